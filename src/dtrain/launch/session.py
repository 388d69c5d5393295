"""What all attempts of one job share: the console, the message channel, the guard process, signal handlers.

A session lasts as long as the launcher works for the job. It decides nothing about the job.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from dtrain import channel
from dtrain.cluster import secret
from dtrain.errors import ConfigurationError
from dtrain.launch import guard
from dtrain.launch.output import Console
from dtrain.launch.task_process import Event, TaskProcess
from dtrain.plain_text import cleaned

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HERE = Path(__file__).parent
_TASK_START = _HERE / "task_start"
_MEMORY = Path("/dev/shm")
_SAID = 2000  # characters of a line from the launcher, which may quote a task's message of any length
_SECRET = "secret"  # the file's name
_LONGEST = 50  # characters of a folder's path: a Unix socket inside it may have about a hundred


class Session:
    """The launcher's state for one job. Use `opened` around all work for the job.

    When the session is closed, no process of the job is left.

    Args:
        stdout, stderr: where the tasks' lines go; by default this process's own streams.
        hears_tasks: whether tasks get a message channel to this process.
        notices: signals to catch while the session is open, in addition to SIGINT, SIGTERM and SIGHUP.

    Attributes:
        events: the queue of process exits, task messages and received signals.
        console: where lines are written.
    """

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        hears_tasks: bool = False,
        notices: tuple[signal.Signals, ...] = (),
    ) -> None:
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.console = Console(
            stdout or sys.stdout, stderr or sys.stderr, on_broken=lambda: self.events.put(signal.SIGPIPE)
        )
        self._mark = new_mark()
        self._scratch: Path | None = None
        self._scratch_memory: Path | None = None
        self._hears_tasks = hears_tasks
        self._signals = (*_FORWARDED, *notices)
        self._listener: channel.Listener | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Catch signals, run the guard and receive messages inside the `with` block."""
        with self._noting_signals(), self._with_folders(), self._guarded(), self._listening():
            try:
                yield
            finally:
                guard.kill_marked(self._mark)

    def scratch(self) -> Path:
        """A folder for this job only, readable by this user only.

        It is deleted when the job ends, even if the launcher is killed.
        """
        if self._scratch is None:
            raise RuntimeError("the session is not open")
        return self._scratch

    def scratch_memory(self) -> Path | None:
        """A folder like `scratch`, in shared memory (/dev/shm); None if the machine has none."""
        return self._scratch_memory

    def left_over(self) -> Iterator[Event]:
        """The events still in the queue. After the session is closed, none are added."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self.events.get_nowait()

    def start(self, command: Sequence[str], env: Mapping[str, str], *inherited: int) -> TaskProcess:
        """Start a process that is a task or a spare.

        Args:
            command: its argument vector.
            env: its whole environment.
            inherited: file descriptors that the process keeps open.
        """
        listener = self._listener
        if listener is None:
            return TaskProcess(command, env, self.events, inherited)
        path = os.pathsep.join([str(_TASK_START), *filter(None, [env.get("PYTHONPATH")])])
        return TaskProcess(
            command,
            {**env, "PYTHONPATH": path},
            self.events,
            (listener.descriptor, *inherited),
            catch_up=listener.catch_up,
        )

    def environment(self, env: Mapping[str, str], mark: str) -> dict[str, str]:
        """A task's environment, extended so that the launcher can find the process and receive its messages.

        Args:
            env: the environment of the task.
            mark: the mark of an attempt, a spare or an MPI start. `guard` finds processes by it and by the
                session's mark.
        """
        marks = [*filter(None, [env.get(guard.MARK_VARIABLE)]), self._mark, mark]
        prepared = {**env, guard.MARK_VARIABLE: "/".join(marks)}
        prepared.pop(channel.VARIABLE, None)  # inherited if this launcher is a task of another job
        prepared[secret.VARIABLE] = str(self.scratch() / _SECRET)
        if self._listener is not None:
            prepared[channel.VARIABLE] = self._listener.address
        return prepared

    def say(self, line: str) -> None:
        """Show a line of the launcher's own to the user; nothing if the line is ""."""
        if line:
            self.console.write_line(f"[dtrain] {cleaned(line, _SAID)}", to="stderr")

    @contextlib.contextmanager
    def _with_folders(self) -> Iterator[None]:
        prefix = f"dtrain-{os.getpid()}-"
        with contextlib.ExitStack() as stack:
            try:
                temporary = tempfile.gettempdir()
                place = temporary if len(temporary) < _LONGEST else "/tmp"
                # mkdtemp gives the folder mode 0700 and a random name, so nobody can have created it before.
                self._scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
                stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
                secret.write_secret(self._scratch / _SECRET)
                if os.access(_MEMORY, os.W_OK):
                    self._scratch_memory = Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY))
                    stack.callback(shutil.rmtree, self._scratch_memory, ignore_errors=True)
            except OSError as error:
                raise ConfigurationError(
                    f"The launcher cannot make a folder of its own for this job: {error}.",
                    hint="Name another place in TMPDIR, or make room there.",
                ) from error
            yield

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if not self._hears_tasks:
            yield
            return
        self._listener = channel.Listener(self.events.put)
        try:
            yield
        finally:
            self._listener.close()
            self._listener = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if sys.platform != "linux":
            yield  # without /proc, the guard could find no process
            return
        folders = [str(folder) for folder in (self._scratch, self._scratch_memory) if folder is not None]
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "guard.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if watcher.stdin is not None:
            watcher.stdin.write(guard.order(self._mark, folders))
            watcher.stdin.flush()
        try:
            yield
        finally:
            watcher.communicate(guard.RELEASE)

    @contextlib.contextmanager
    def _noting_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self.events.put(signum)

        # A signal that was ignored when we started (nohup) stays ignored.
        caught = [s for s in self._signals if signal.getsignal(s) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, note) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def new_mark() -> str:
    """A word that is unique to one job or attempt; `guard` finds processes by it."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"
