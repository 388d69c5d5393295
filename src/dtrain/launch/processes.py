"""Runs the processes of one job on this machine until all have ended, and leaves none behind.

It knows commands, signals and exit codes, not what the processes compute or how they find one another.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

from dtrain import channel
from dtrain.launch import guard
from dtrain.launch.output import Console, OutputReader
from dtrain.launch.policy import Decision, Policy
from dtrain.topology import Task

TAIL_LINES = 20
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class TaskCommand:
    """What to run as one task: its argument vector and its whole environment."""

    task: Task
    command: Sequence[str]
    env: Mapping[str, str]


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        exit_codes: of every task; negative for a death by signal.
        first_failure: the task that failed of itself before any other, or None.
        signal: the signal that the launcher was sent (SIGPIPE: nobody reads its output any more), or None.
        timed_out: the tasks that still ran when the time was over.
        tails: the last lines of every task, standard output and error together.
    """

    exit_codes: dict[Task, int] = field(default_factory=dict)
    first_failure: Task | None = None
    signal: int | None = None
    timed_out: tuple[Task, ...] = ()
    tails: dict[Task, list[str]] = field(default_factory=dict)


class _Child:
    """One running task: its process, the threads that read it, and the one that waits for it."""

    def __init__(
        self,
        spec: TaskCommand,
        console: Console,
        events: queue.SimpleQueue[_Child | channel.Request | int],
        inherited: Sequence[int],
    ) -> None:
        self.task = spec.task
        self.judged = False
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._events = events
        self._reap_lock = threading.Lock()
        self._popen = subprocess.Popen(
            [*_wrapper(), *spec.command],
            env=dict(spec.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=inherited,
        )
        self.pid = self._popen.pid
        if self._popen.stdout is None or self._popen.stderr is None:
            raise RuntimeError("subprocess made no pipes")
        # The reader closes the descriptor; the file object must not close its number a second time.
        self._readers = [
            OutputReader(os.dup(pipe.fileno()), f"[{self.task}] ", console, to=name, tail=self.tail)
            for name, pipe in (("stdout", self._popen.stdout), ("stderr", self._popen.stderr))
        ]
        self._popen.stdout.close()
        self._popen.stderr.close()
        self._waiter = threading.Thread(target=self._wait, name=f"dtrain-wait {self.task}", daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def signal_group(self, signum: int) -> None:
        """Send a signal to the task and all of its process group, unless it has ended."""
        with self._reap_lock:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, signum)

    def finish_output(self) -> None:
        """Let the readers end, also where another process still holds the pipes."""
        for reader in self._readers:
            reader.finish()

    def join_output(self, patience: float = 2.0) -> None:
        """Wait until all that the task wrote has been shown, at most `patience` seconds."""
        self.finish_output()
        for reader in self._readers:
            reader.join(patience)

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
            self.exit_code = self._popen.wait()
        self._events.put(self)


class Job:
    """All the processes of one job, as one thing that is started, watched and ended.

    What a task's end means is the policy's to say. Where it means the failure of the job, the others get
    SIGTERM and, `grace` seconds later, SIGKILL. SIGINT, SIGTERM and SIGHUP are passed on to every task, with
    the same grace; a second one kills at once. Signals are seen where `run` is called in the main thread.

    Args:
        commands: the tasks to run.
        grace: seconds between asking tasks to end and killing them.
        policy: by default, the first failure ends the job.
        timeout: seconds that the job may take, or None.
        stdout, stderr: where the tasks' lines go; by default this process's own streams.
    """

    def __init__(
        self,
        commands: Sequence[TaskCommand],
        *,
        grace: float,
        policy: Policy | None = None,
        timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._commands = {spec.task: spec for spec in commands}
        self._grace = grace
        self._policy = policy or Policy()
        self._deadline = None if timeout is None else time.monotonic() + timeout
        # Children that ended, requests, signals: a SimpleQueue may be put to from a signal handler.
        self._events: queue.SimpleQueue[_Child | channel.Request | int] = queue.SimpleQueue()
        self.console = Console(
            stdout or sys.stdout, stderr or sys.stderr, on_broken=lambda: self._events.put(signal.SIGPIPE)
        )
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._listener: channel.Listener | None = None
        self._children: dict[Task, _Child] = {}
        self._due: dict[Task, float] = {}
        self._failed: tuple[Task, float] | None = None  # and when the others are told to end
        self._linger_until: float | None = None
        self._kill_at: float | None = None
        self._outcome = Outcome()

    def run(self, *, after: float = 0.0) -> Outcome:
        """Start every task, `after` seconds from now, and return when no process of the job is left."""
        with self._forwarding_signals(), self._guarded(), self._listening():
            try:
                if self._pause(after):
                    for task in self._commands:
                        self._start(task)
                    self._watch()
            finally:
                self._end()
        return self._outcome

    def _pause(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._outcome.signal is None and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                if isinstance(event, int):
                    self._outcome.signal = event
        return self._outcome.signal is None

    def _start(self, task: Task) -> None:
        inherited = () if self._listener is None else (self._listener.descriptor,)
        child = _Child(self._prepared(self._commands[task]), self.console, self._events, inherited)
        self._children[task] = child
        self._say(self._policy.on_start(task, child.pid))

    def _say(self, line: str) -> None:
        if line:
            self.console.write_line(f"[dtrain] {line}", to="stderr")

    def _watch(self) -> None:
        while self._due or any(child.exit_code is None for child in self._children.values()):
            try:
                event = self._events.get(timeout=self._seconds_to_next_deadline())
            except queue.Empty:
                self._on_deadline()
                continue
            if isinstance(event, _Child):
                self._on_exit()
            elif isinstance(event, channel.Request):
                self._on_request(event)
            else:
                self._on_signal(event)
        self._on_exit()

    def _on_exit(self) -> None:
        ended = [c for c in self._children.values() if c.exit_code is not None and not c.judged]
        for child in sorted(ended, key=lambda child: child.ended_at):
            if self._kill_at is not None or self._linger_until is not None:
                return  # from now on they end because the job does
            child.judged = True
            if self._failed is not None and child.exit_code:
                self._fail(self._failed[0])  # nothing is left to wait for
            else:
                self._follow(child, self._policy.on_exit(child.task, child.exit_code or 0))

    def _follow(self, child: _Child, decision: Decision) -> None:
        self._say(decision.line)
        if decision.action == "fail" and decision.after:
            self._failed = child.task, time.monotonic() + decision.after
        elif decision.action == "fail":
            self._fail(child.task)
        elif decision.action == "finish":
            self._due.clear()
            self._linger_until = time.monotonic() + decision.after
        elif decision.action == "restart":
            child.finish_output()
            self._due[child.task] = time.monotonic() + decision.after

    def _fail(self, task: Task) -> None:
        self._outcome.first_failure = task
        self._stop(signal.SIGTERM)

    def _on_request(self, request: channel.Request) -> None:
        child = self._children.get(request.task)
        if child is None or child.exit_code is not None or self._kill_at is not None:
            return
        if request.pid is None or request.pid == child.pid:  # another one was started since: it is not meant
            self._say(f"{request.task}, process {child.pid}, is killed: {request.reason}")
            child.signal_group(signal.SIGKILL)

    def _on_signal(self, signum: int) -> None:
        if self._outcome.signal is None:
            self._outcome.signal = signum
            self._stop(signal.SIGTERM if signum == signal.SIGPIPE else signum)
        elif signum != signal.SIGPIPE:
            self._stop(signal.SIGKILL)

    def _on_deadline(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._stop(signal.SIGKILL)
        elif self._linger_until is not None:
            if now >= self._linger_until:
                self._stop(signal.SIGTERM)
        elif self._failed is not None:
            if now >= self._failed[1]:
                self._fail(self._failed[0])
        elif self._deadline is not None and now >= self._deadline:
            self._outcome.timed_out = tuple(t for t, c in self._children.items() if c.exit_code is None)
            self._stop(signal.SIGTERM)
        else:
            for task in [task for task, due in self._due.items() if now >= due]:
                del self._due[task]
                self._start(task)

    def _stop(self, signum: int) -> None:
        self._due.clear()
        for child in self._children.values():
            if child.exit_code is None:
                child.signal_group(signum)
        self._kill_at = time.monotonic() + (1.0 if signum == signal.SIGKILL else self._grace)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [self._kill_at]
        if self._kill_at is None:
            failing = None if self._failed is None else self._failed[1]
            deadlines = [self._linger_until, failing, self._deadline, *self._due.values()]
        nearest = min((at for at in deadlines if at is not None), default=None)
        return None if nearest is None else max(0.0, nearest - time.monotonic())

    def _end(self) -> None:
        for child in self._children.values():
            child.signal_group(signal.SIGKILL)
        guard.kill_marked(self._mark)
        for child in self._children.values():
            child.join_output()
            self._outcome.exit_codes[child.task] = (
                -signal.SIGKILL if child.exit_code is None else child.exit_code
            )
            self._outcome.tails[child.task] = list(child.tail)

    def _prepared(self, spec: TaskCommand) -> TaskCommand:
        outer = spec.env.get(guard.MARK_VARIABLE)
        env = {**spec.env, guard.MARK_VARIABLE: f"{outer}/{self._mark}" if outer else self._mark}
        env.pop(channel.VARIABLE, None)  # that of a job around this one
        if self._listener is not None:
            env[channel.VARIABLE] = self._listener.address
        return TaskCommand(spec.task, spec.command, env)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if not self._policy.takes_requests:
            yield
            return
        self._listener = channel.Listener(self._events.put)
        try:
            yield
        finally:
            self._listener.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if sys.platform != "linux":
            yield  # without /proc a guard could find nothing
            return
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "guard.py"), self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            watcher.communicate(guard.RELEASE)

    @contextlib.contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self._events.put(signum)

        # A signal that was ignored when we started (nohup) stays ignored.
        caught = [s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, note) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def _wrapper() -> list[str]:
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", str(_HERE / "exec_child.py"), str(os.getpid())]
