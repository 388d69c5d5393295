"""Runs the processes of one job, or of one attempt, on this machine until all have ended; leaves none behind.

It handles commands, signals and exit codes. It does not know what the processes compute or how they connect.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from dtrain.launch import guard
from dtrain.launch.policy import Decision, Policy
from dtrain.launch.session import Session, new_mark
from dtrain.launch.task_process import Event, TaskCommand, TaskProcess
from dtrain.task_messages import Request
from dtrain.topology import Task

__all__ = ["Job", "Outcome", "TaskCommand"]

_TRACE_PATIENCE = 0.3  # seconds to read a failed task's last lines from its pipes


class Reserve(Protocol):
    """A supply of processes that are ready to become tasks."""

    def take(self, env: Mapping[str, str]) -> TaskProcess | None:
        """A process that continues as a task with this environment, or None if there is none."""


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        exit_codes: the exit code of every task; negative for a death by signal.
        first_failure: the task whose failure ended the job, or None.
        reason: how that task failed, in words, if its exit status does not show it.
        signal: the signal that the launcher received, or None. SIGPIPE means that nobody reads its output.
        timed_out: the tasks that still ran when the job's timeout expired.
        tails: the last lines of every task, standard output and standard error together.
    """

    exit_codes: dict[Task, int] = field(default_factory=dict)
    first_failure: Task | None = None
    reason: str = ""
    signal: int | None = None
    timed_out: tuple[Task, ...] = ()
    tails: dict[Task, list[str]] = field(default_factory=dict)


class Job:
    """Starts, watches and ends all processes of one job, or of one attempt of a job.

    The policy decides what events mean. When a task's exit means that the job has failed, the other tasks get
    SIGTERM and, after the policy's grace, SIGKILL; or SIGKILL at once. SIGINT, SIGTERM and SIGHUP are
    forwarded to every task, with the same grace; a second signal kills the tasks at once. Signals are only
    caught if `run` is called in the main thread.

    Args:
        commands: the tasks to run.
        policy: by default, the first failure ends the job.
        timeout: the seconds that the job may take; None sets no limit.
        stdout, stderr: where the tasks' lines go; by default this process's own streams.
        session: an open session if this is one attempt of several; its streams replace `stdout`, `stderr`.
        reserve: a supply of waiting processes, asked before a new process is started.
    """

    def __init__(
        self,
        commands: Sequence[TaskCommand],
        *,
        policy: Policy | None = None,
        timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        session: Session | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self._commands = {spec.task: spec for spec in commands}
        self._policy = policy or Policy()
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._own_session = session is None
        self._session = session or Session(
            stdout=stdout, stderr=stderr, hears_tasks=self._policy.takes_requests
        )
        self._reserve = reserve
        self._events = self._session.events
        self._mark = new_mark()
        self._children: dict[Task, TaskProcess] = {}
        self._due: dict[Task, float] = {}
        self._failed: tuple[Task, float, Decision] | None = None  # the float: when to carry the decision out
        self._linger_until: float | None = None
        self._kill_at: float | None = None
        self._waiting = False
        self._others_after: Sequence[Task] = ()  # when these have ended, the other tasks get SIGTERM
        self._outcome = Outcome()

    def run(self, *, after: float = 0.0) -> Outcome:
        """Start every task `after` seconds from now; return when no process of the job is left."""
        with self._session.opened() if self._own_session else contextlib.nullcontext():
            try:
                if self._pause(after):
                    for task in self._commands:
                        self._start(task)
                    self._watch()
            finally:
                self._end()
        return self._outcome

    def process(self, task: Task) -> TaskProcess | None:
        """The process of a task, or None before it is started."""
        return self._children.get(task)

    def _pause(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            try:
                # Also without a pause: a signal may have arrived since the last attempt.
                event = self._events.get(timeout=left) if left > 0 else self._events.get_nowait()
            except queue.Empty:
                if left <= 0:
                    return True
                continue
            if isinstance(event, int) and event:
                self._outcome.signal = event
                return False
            self._note(event)

    def _start(self, task: Task) -> None:
        spec = self._commands[task]
        env = self._session.environment(spec.env, self._mark)
        process = self._reserve.take(env) if self._reserve is not None else None
        if process is None:
            process = self._session.start(spec.command, env)
        process.become(task, self._session.console)
        self._children[task] = process
        self._session.say(self._policy.on_start(task, process.pid))

    def _watch(self) -> None:
        while self._due or not all(child.announced for child in self._children.values()):
            try:
                event = self._events.get(timeout=self._seconds_to_next_deadline())
            except queue.Empty:
                self._on_deadline()
            else:
                self._on_event(event)
            self._check()
        if self._failed is not None and self._kill_at is None and self._linger_until is None:
            # No task is left whose exit could change the decision.
            self._fail(self._failed[0], self._failed[2])

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TaskProcess):
            event.announced = True
            self._on_exit()
        elif isinstance(event, Request):
            self._on_request(event)
        elif not isinstance(event, int):
            self._note(event)
        elif event:
            self._on_signal(event)

    def _note(self, event: Event) -> None:
        if not isinstance(event, TaskProcess | Request | int):
            self._policy.on_message(event)

    def _on_exit(self) -> None:
        if self._others_after and not self._running(self._others_after):
            self._others_after = ()
            self._stop(signal.SIGTERM)
        ended = [child for child in self._children.values() if child.ended_at and not child.judged]
        for child in sorted(ended, key=lambda child: child.ended_at):
            if self._kill_at is not None or self._linger_until is not None:
                return  # the job is ending, so these exits mean nothing
            if not child.announced:
                return  # exits are judged in their order, each after all messages of its task
            child.judged = True
            if child.task is None or child.exit_code is None:
                continue
            if child.exit_code > 0:
                child.join_output(_TRACE_PATIENCE)
            if self._failed is not None and child.exit_code:
                decision = self._policy.on_further_exit(self._failed[0], child.task, child.exit_code)
            else:
                decision = self._policy.on_exit(child.task, child.exit_code)
            self._follow(child.task, decision)

    def _follow(self, judged: Task | None, decision: Decision) -> None:
        self._session.say(decision.line)
        task = decision.task or judged
        if decision.action in ("fail", "kill", "wait") and task is not None:
            if decision.after and decision.action != "wait":
                self._failed = task, time.monotonic() + decision.after, decision
            else:
                self._fail(task, decision)
        elif decision.action == "finish":
            self._due.clear()
            self._linger_until = time.monotonic() + decision.after
        elif decision.action == "restart" and task is not None:
            self._children[task].finish_output()
            self._due[task] = time.monotonic() + decision.after
        elif decision.action == "signal":
            for pid in decision.pids:  # reported by tasks; `signal_member` rejects ids of foreign processes
                any(child.signal_member(pid, decision.signum) for child in self._children.values())

    def _fail(self, task: Task, decision: Decision) -> None:
        self._outcome.first_failure = task
        self._outcome.reason = decision.reason
        self._waiting = decision.action == "wait"
        if self._waiting:
            self._kill_at = time.monotonic() + decision.after
        else:
            self._stop(signal.SIGKILL if decision.action == "kill" else signal.SIGTERM)

    def _on_request(self, request: Request) -> None:
        child = self._children.get(request.task)
        if child is None or child.exit_code is not None or self._kill_at is not None:
            return
        if not self._policy.takes_requests:
            return
        if request.pid is None or request.pid == child.pid:  # else the request meant an earlier process
            self._session.say(f"{request.task}, process {child.pid}, is killed: {request.reason}")
            child.signal_group(signal.SIGKILL)

    def _on_signal(self, signum: int) -> None:
        if self._outcome.signal is None:
            self._outcome.signal = signum
            if self._waiting:
                return  # the tasks are saving and ending by themselves; a signal could interrupt a save
            # Slurm's notice (SIGUSR1) and a closed output stream (SIGPIPE) also mean that the job should end.
            told = signal.SIGTERM if signum in (signal.SIGPIPE, signal.SIGUSR1) else signum
            running = self._running(self._children)
            first = self._policy.heeds(signum, running)
            self._stop(told, first)
            self._others_after = first if len(first) < len(running) else ()
        elif signum != signal.SIGPIPE:
            self._stop(signal.SIGKILL)

    def _check(self) -> None:
        if self._kill_at is None and self._linger_until is None and self._failed is None:
            due = self._policy.next_check()
            if due is not None and time.monotonic() >= due:
                self._follow(None, self._policy.check())

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
                self._fail(self._failed[0], self._failed[2])
        elif self._deadline is not None and now >= self._deadline:
            self._outcome.timed_out = tuple(t for t, c in self._children.items() if c.exit_code is None)
            self._stop(signal.SIGTERM)
        else:
            for task in [task for task, due in self._due.items() if now >= due]:
                del self._due[task]
                self._start(task)

    def _running(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if self._children[task].exit_code is None]

    def _stop(self, signum: int, tasks: Iterable[Task] | None = None) -> None:
        self._due.clear()
        for task in self._running(self._children if tasks is None else tasks):
            self._children[task].signal_group(signum)
        patience = 1.0 if signum == signal.SIGKILL else self._policy.grace()
        self._kill_at = time.monotonic() + patience

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [self._kill_at]
        if self._kill_at is None:
            failing = None if self._failed is None else self._failed[1]
            deadlines = [self._linger_until, failing, self._deadline, *self._due.values()]
            if self._linger_until is None and failing is None:
                deadlines.append(self._policy.next_check())
        nearest = min((at for at in deadlines if at is not None), default=None)
        return None if nearest is None else max(0.0, nearest - time.monotonic())

    def _end(self) -> None:
        for child in self._children.values():
            child.signal_group(signal.SIGKILL)
        guard.kill_marked(self._mark)
        for task, child in self._children.items():
            child.join_output()
            self._outcome.exit_codes[task] = -signal.SIGKILL if child.exit_code is None else child.exit_code
            self._outcome.tails[task] = list(child.tail)
        for event in self._session.left_over():
            if isinstance(event, int) and event and self._outcome.signal is None:
                self._outcome.signal = event
            self._note(event)
