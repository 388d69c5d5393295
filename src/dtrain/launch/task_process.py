"""One process of a job: its command, the threads that read its output, and the one that waits for its end.

It starts and signals the process and says when it has ended; what that means is the job's business.
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
"""How many of a task's last lines are kept for the report of its failure."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class TaskCommand:
    """What to run as one task: its argument vector and its whole environment."""

    task: Task
    command: Sequence[str]
    env: Mapping[str, str]


class TaskProcess:
    """A process that is a task, or a spare that becomes one.

    Args:
        command: its argument vector.
        env: its whole environment.
        events: gets this object when the process has ended.
        inherited: the descriptors that it keeps.
        catch_up: called when it has ended, to hear all that it said before its end is told.

    Attributes:
        task: which one it is; None for a spare.
        announced: whether its end has been taken from `events`.
        judged: whether the job has taken note of its end.
        exit_code: negative for a death by signal; None while it runs.
        ended_at: when it ended, by `time.monotonic()`; 0 while it runs.
        tail: its last lines, standard output and error together.
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
        """Show from now on what it writes, and has written, as this task's lines."""
        self.task = task
        if self._popen.stdout is None or self._popen.stderr is None:
            raise RuntimeError("subprocess made no pipes")
        # The reader closes the descriptor; the file object must not close its number a second time.
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
        """Send a signal to the task and all of its process group, unless it has ended."""
        with self._reap_lock:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signum)

    def signal_member(self, pid: int, signum: int) -> bool:
        """Send a signal to a process if it is this task's, or one that it started; whether that was done."""
        if pid == self.pid:
            with self._reap_lock:
                if self._popen.returncode is None:
                    os.kill(pid, signum)
                    return True
            return False
        with contextlib.suppress(OSError, OverflowError, AttributeError, psutil.Error):
            handle = os.pidfd_open(pid)  # from here on the number cannot pass to another process unseen
            try:
                if self.exit_code is None and self._started(pid):
                    signal.pidfd_send_signal(handle, signum)
                    return True
            finally:
                os.close(handle)
        return False

    def _started(self, pid: int) -> bool:
        """Whether a process is of this task's session, or was started by it or by one that it started."""
        return os.getsid(pid) == self.pid or any(
            each.pid == self.pid for each in psutil.Process(pid).parents()
        )

    def stopped(self) -> bool:
        """Whether the process is there but held, as by SIGSTOP; False where the system does not tell."""
        return is_stopped(self.pid)

    def uses(self, library: str) -> bool:
        """Whether it has loaded a library with this in its name; False where /proc does not tell."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace")
            return library in maps
        return False

    def finish_output(self) -> None:
        """Let the readers end, also where another process still holds the pipes."""
        for reader in self._readers:
            reader.finish()

    def join_output(self, patience: float = 2.0) -> None:
        """Wait until all that the task wrote has been shown, at most `patience` seconds."""
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
            # Not reaped yet, so that the number of the group cannot have passed to a stranger below.
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
"""What a job waits for: the end of a process, a task's message, a signal's number, or 0, which only wakes."""


def bound_to_launcher() -> list[str]:
    """What to put before a command that must not outlive this process."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", str(_HERE / "exec_child.py"), str(os.getpid())]
