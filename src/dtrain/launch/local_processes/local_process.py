"""One process on this machine: starts it, reads its output, sends it signals and reports its exit.

What an exit means is not decided here; see `policy`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from dtrain.base.clock import REAL, Clock
from dtrain.base.tcp import listens
from dtrain.environments.topology import Task
from dtrain.launch.job.task_handle import TaskHandle
from dtrain.launch.job.task_output import Console, OutputReader

_HERE = Path(__file__).parent


class LocalProcess(TaskHandle):
    """A process of this machine that is a task, or a spare that may become one.

    Args:
        command: the argument vector.
        env: the whole environment of the process.
        on_exit: called with this object when the process has ended.
        inherited: the file descriptors that the process keeps open.
        catch_up: called when the process has ended, before `on_exit`; it returns when all messages of the
            process have been received.
        stdin: the standard input of the process.
        clock: shows when the process has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        on_exit: Callable[[LocalProcess], None],
        inherited: Sequence[int] = (),
        catch_up: Callable[[], None] | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        clock: Clock = REAL,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._on_exit = on_exit
        self._catch_up = catch_up
        self._reap_lock = threading.Lock()
        self._readers: list[OutputReader] = []
        self._popen = subprocess.Popen(
            [*bound_to_launcher(), *command],
            env=dict(env),
            stdin=stdin,
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
        # The reader closes its descriptor, so it gets a duplicate: the file object closes the original.
        self._readers = [
            OutputReader(os.dup(pipe.fileno()), task, console, to=name, tail=self.tail, clock=self._clock)
            for name, pipe in (("stdout", self._popen.stdout), ("stderr", self._popen.stderr))
            if pipe is not None
        ]
        self._close_pipes()
        for reader in self._readers:
            reader.start()

    def discard(self) -> None:
        """End a spare that is not needed."""
        self.signal(signal.SIGKILL)
        self._close_pipes()

    def signal(self, signum: int) -> None:
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
            parent.pid == self.pid for parent in psutil.Process(pid).parents()
        )

    def has_taken(self, pid: int, signum: int) -> bool:
        """Whether no signal `signum` waits for a process; False without /proc."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
            waiting = [line.split()[1] for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
            return not any(int(mask, 16) & 1 << signum - 1 for mask in waiting)
        return False

    def stopped(self, pid: int | None = None) -> bool:
        """Whether a process is stopped by SIGSTOP or a debugger; False if the system does not tell."""
        return is_stopped(self.pid if pid is None else pid)

    def uses(self, library: str) -> bool:
        """Whether the process has loaded a library whose path contains `library`; False without /proc."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace")
            return library in maps
        return False

    def listens(self, ports: Collection[int]) -> bool:
        """Whether the process listens on one of these ports."""
        return listens(self.pid, ports)

    def join_output(self, patience: float = 2.0) -> None:
        """Wait until all output of the task has been shown, at most `patience` seconds for each stream."""
        for reader in self._readers:
            reader.finish()  # end, even if another process still holds the pipes
        for reader in self._readers:
            reader.join(patience)

    def _close_pipes(self) -> None:
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    def _wait(self) -> None:
        pid = self._popen.pid
        # Do not reap the process yet: until then, no other process group can get its id.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self.ended_at = self._clock.now()
        with self._reap_lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            code = self._popen.wait()
        if self._catch_up is not None:
            self._catch_up()
        self.exit_code = code
        self._on_exit(self)


@contextlib.contextmanager
def piped(
    command: Sequence[str], env: Mapping[str, str], patience: Callable[[], float]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes], IO[bytes]]]:
    """Run a process that is no task inside the context; yields it, its input, its output and its errors.

    Args:
        command: the argument vector.
        env: the whole environment of the process.
        patience: called when the context ends; the seconds after which the process is killed.
    """
    pipe = subprocess.PIPE
    arguments = [*bound_to_launcher(), *command]
    process = subprocess.Popen(
        arguments, env=dict(env), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise RuntimeError("pipes were asked for")
    try:
        yield process, process.stdin, process.stdout, process.stderr
    finally:
        try:
            process.wait(patience())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bound_to_launcher() -> list[str]:
    """The arguments to put before a command that must not outlive this process."""
    return [sys.executable, "-I", "-S", str(_HERE / "exec_child.py"), str(os.getpid())]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or a debugger; False if the system does not tell."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError, ValueError):
        return False
