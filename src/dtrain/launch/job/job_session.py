"""What all attempts of one job share in this process: the queue of events, the console, folders, signals.

A session lasts as long as this process works for the job. It makes no decisions and starts no tasks; a
`Launcher` starts them.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from dtrain.base.clock import REAL, Clock
from dtrain.base.plain_text import cleaned
from dtrain.errors import ConfigurationError
from dtrain.launch.job import job_folders
from dtrain.launch.job.task_handle import Event
from dtrain.launch.job.task_output import Console
from dtrain.process_group import secret

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAID = 2000  # characters shown of a launcher's line, which may quote a task's message of any length
_SECRET = "secret"  # the file's name
_LONGEST = 50  # characters of a folder's path: a Unix socket inside it may have about a hundred


class Session:
    """The state of this process for one job. Use `opened` around all work for the job.

    Args:
        stdout, stderr: where the tasks' lines go; by default this process's own streams.
        takes_reports: whether tasks get a channel for messages to this process.
        notices: signals to catch while the session is open, in addition to SIGINT, SIGTERM and SIGHUP.
        console: where lines are written, if not to these streams.
        shared_secret: the tasks' secret, if tasks of another session share it; by default a new one.
        clock: the clock of all time limits of the job.

    Attributes:
        events: the queue of task exits, task messages and received signals.
        console: where lines are written.
        takes_reports, clock: as given.
        signalled: the last signal that this process received while the session was open; 0 for none.
    """

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        takes_reports: bool = False,
        notices: tuple[signal.Signals, ...] = (),
        console: Console | None = None,
        shared_secret: str | None = None,
        clock: Clock = REAL,
    ) -> None:
        self.clock = clock
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.console = console or Console(
            stdout or sys.stdout, stderr or sys.stderr, on_broken=lambda: self.events.put(signal.SIGPIPE)
        )
        self.takes_reports = takes_reports
        self._shared_secret = shared_secret
        self.signalled = 0
        self._scratch: Path | None = None
        self._scratch_memory: Path | None = None
        self._signals = (*_FORWARDED, *notices)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Catch signals, and have folders for the job, inside the `with` block."""
        with self._noting_signals(), self._with_folders():
            yield

    def scratch(self) -> Path:
        """A folder for this job only, readable by this user only.

        It is deleted when the job ends, even if the launcher is killed.
        """
        if self._scratch is None:
            raise RuntimeError("the session is not open")
        return self._scratch

    def scratch_memory(self) -> Path | None:
        """A folder like `scratch`, in shared memory (/dev/shm); None if none can be made there."""
        return self._scratch_memory

    def secret(self) -> Path:
        """The file with the secret that the tasks of this job share."""
        return self.scratch() / _SECRET

    def folders(self) -> list[Path]:
        """The folders to delete when the job ends."""
        return [folder for folder in (self._scratch, self._scratch_memory) if folder is not None]

    def remaining_events(self) -> Iterator[Event]:
        """The events still in the queue. After launcher and session are closed, none are added."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.events.get_nowait()

    def say(self, line: str) -> None:
        """Show a line of the launcher's own to the user; nothing if the line is ""."""
        if line:
            self.console.write_line(f"[dtrain] {cleaned(line, _SAID)}", to="stderr")

    @contextlib.contextmanager
    def _with_folders(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                temporary = tempfile.gettempdir()
                parent = temporary if len(temporary) < _LONGEST else "/tmp"
                job_folders.clear_dead(parent, job_folders.MEMORY)
                self._scratch = job_folders.make(parent)
                stack.callback(job_folders.remove, self._scratch)
                secret.write_secret(self.secret(), self._shared_secret)
            except OSError as error:
                raise ConfigurationError(
                    f"The launcher cannot create a temporary folder for this job: {error}.",
                    hint="Set TMPDIR to another folder, or free some space there.",
                ) from error
            self._scratch_memory = job_folders.make_in_memory()
            if self._scratch_memory is not None:
                stack.callback(job_folders.remove, self._scratch_memory)
            yield

    @contextlib.contextmanager
    def _noting_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self.signalled = signum
            self.events.put(signum)

        # A signal that was ignored when we started (nohup) stays ignored.
        caught = [s for s in self._signals if signal.getsignal(s) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, note) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
