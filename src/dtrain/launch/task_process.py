"""One process of a job: starts it, reads its output, sends it signals and reports its exit.

What an exit means is not decided here; see `policy`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dtrain.launch.output import Console, OutputReader
from dtrain.launch.watchdog import is_stopped
from dtrain.task_messages import Message
from dtrain.topology import Task

TAIL_LINES = 20
"""The number of a task's last lines that are kept for the report of its failure."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class TaskCommand:
    """What one task runs: its argument vector and its whole environment."""

    task: Task
    command: Sequence[str]
    env: Mapping[str, str]


class TaskProcess:
    """A process that is a task, or a spare that may become one.

    Args:
        command: the argument vector.
        env: the whole environment of the process.
        events: the queue that receives this object when the process has ended.
        inherited: the file descriptors that the process keeps open.
        catch_up: called when the process has ended, before the exit is put into `events`; it returns when all
            messages of the process have been received.

    Attributes:
        task: the task that the process is; None for a spare.
        announced: whether its exit has been taken from `events`.
        judged: whether the policy has decided what its exit means.
        exit_code: the exit code, negative for a death by signal; None while it runs.
        ended_at: when it ended, by `time.monotonic()`; 0 while it runs.
        tail: its last lines, standard output and standard error together.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        events: queue.SimpleQueue[Event],
        inherited: Sequence[int] = (),
        catch_up: Callable[[], None] | None = None,
    ) -> None:
        self.task: Task | None = None
        self.announced = self.judged = False
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._events = events
        self._catch_up = catch_up
        self._reap_lock = threading.Lock()
        self._readers: list[OutputReader] = []
        self._popen = subprocess.Popen(
            [*bound_to_launcher(), *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=inherited,
        )
        self.pid = self._popen.pid
        threading.Thread(target=self._wait, name=f"dtrain-wait {self.pid}", daemon=True).start()

    def become(self, task: Task, console: Console) -> None:
        """Make this process a task: its output, also what it wrote so far, is shown as that task's lines."""
        self.task = task
        if self._popen.stdout is None or self._popen.stderr is None:
            raise RuntimeError("subprocess made no pipes")
        # The reader closes its descriptor, so it gets a duplicate: the file object closes the original.
        self._readers = [
            OutputReader(os.dup(pipe.fileno()), f"[{task}] ", console, to=name, tail=self.tail)
            for name, pipe in (("stdout", self._popen.stdout), ("stderr", self._popen.stderr))
        ]
        self._close_pipes()
        for reader in self._readers:
            reader.start()

    def discard(self) -> None:
        """End a spare that is not needed."""
        self.signal_group(signal.SIGKILL)
        self._close_pipes()

    def signal_group(self, signum: int) -> None:
        """Send a signal to the process and its whole process group, unless the process has ended."""
        with self._reap_lock:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signum)

    def signal_member(self, pid: int, signum: int) -> bool:
        """Send a signal to this process or one that it started; other ids are ignored.

        Returns:
            Whether the signal was sent.
        """
        if pid == self.pid:
            with self._reap_lock:
                if self._popen.returncode is None:
                    os.kill(pid, signum)
                    return True
            return False
        with contextlib.suppress(OSError, OverflowError, AttributeError, psutil.Error):
            handle = os.pidfd_open(pid)  # refers to this very process, even if its id is reused
            try:
                if self.exit_code is None and self._started(pid):
                    signal.pidfd_send_signal(handle, signum)
                    return True
            finally:
                os.close(handle)
        return False

    def _started(self, pid: int) -> bool:
        """Whether a process is in this process's session, or is one of its descendants."""
        return os.getsid(pid) == self.pid or any(
            each.pid == self.pid for each in psutil.Process(pid).parents()
        )

    def stopped(self) -> bool:
        """Whether the process is stopped by SIGSTOP or a debugger; False if the system does not tell."""
        return is_stopped(self.pid)

    def uses(self, library: str) -> bool:
        """Whether the process has loaded a library whose path contains `library`; False without /proc."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace")
            return library in maps
        return False

    def finish_output(self) -> None:
        """Let the output readers end, even if another process still holds the pipes."""
        for reader in self._readers:
            reader.finish()

    def join_output(self, patience: float = 2.0) -> None:
        """Wait until all output of the task has been shown, at most `patience` seconds for each stream."""
        self.finish_output()
        for reader in self._readers:
            reader.join(patience)

    def _close_pipes(self) -> None:
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    def _wait(self) -> None:
        pid = self._popen.pid
        if hasattr(os, "waitid"):
            # Do not reap the process yet: until then, no other process group can get its id.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        self.ended_at = time.monotonic()
        with self._reap_lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            code = self._popen.wait()
        if self._catch_up is not None:
            self._catch_up()
        self.exit_code = code
        self._events.put(self)


Event = TaskProcess | Message | int
"""An event of a job: an ended process, a task's message, the number of a received signal, or 0.

0 means nothing; it only wakes the thread that waits for events.
"""


def bound_to_launcher() -> list[str]:
    """The arguments to put before a command that must not outlive this process; empty where not on Linux."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", str(_HERE / "exec_child.py"), str(os.getpid())]
