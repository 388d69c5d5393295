"""Runs the tasks of one job, or of one attempt, until all have ended; leaves none behind.

It handles commands, signals and exit codes. A launcher starts the tasks, a policy says what an event means.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dtrain.environments.topology import Task
from dtrain.launch.job.launcher import Launcher
from dtrain.launch.job.policy import Decision, Policy
from dtrain.launch.job.task_handle import Event, TaskCommand, TaskHandle
from dtrain.launch.supervision.spares import Spares
from dtrain.task.task_messages import Request

__all__ = ["Job", "JobOutcome", "TaskCommand"]

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""The signals by which a cluster announces that it is about to take this machine away."""

_ONE_NOTICE = 2.0  # seconds in which further ones are the same notice: Slurm signals each launcher of a job
_TRACE_PATIENCE = 0.3  # seconds to read a failed task's last lines from its pipes


@dataclass
class JobOutcome:
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
    """Starts, watches and ends all tasks of one job, or of one attempt of a job.

    The policy decides what events mean. When a task's exit means that the job has failed, the other tasks get
    SIGTERM and, after the policy's grace, SIGKILL; or SIGKILL at once. SIGINT, SIGTERM and SIGHUP are
    forwarded to every task, with the same grace; a second signal kills the tasks at once. Signals are only
    caught if `run` is called in the main thread.

    Args:
        commands: the tasks to run.
        launcher: starts the tasks; it is open.
        policy: by default, the first failure ends the job.
        timeout: the seconds that the job may take; None sets no limit.
        spares: waiting processes that become tasks before new ones are started.
    """

    def __init__(
        self,
        commands: Sequence[TaskCommand],
        launcher: Launcher,
        *,
        policy: Policy | None = None,
        timeout: float | None = None,
        spares: Spares | None = None,
    ) -> None:
        self._commands = {spec.task: spec for spec in commands}
        self._policy = policy or Policy()
        self._launcher = launcher
        self._session = launcher.session
        self._clock = self._session.clock
        self._deadline = None if timeout is None else self._clock.now() + timeout
        self._spares = spares
        self._events = self._session.events
        self._children: dict[Task, TaskHandle] = {}
        self._announced: set[TaskHandle] = set()  # their exits have been taken from the queue
        self._judged: set[TaskHandle] = set()  # the policy has decided what their exits mean
        self._due: dict[Task, float] = {}
        self._failed: tuple[Task, float, Decision] | None = None  # the float: when to carry the decision out
        self._linger_until: float | None = None
        self._kill_at: float | None = None
        self._waiting = False
        self._others_after: Sequence[Task] = ()  # when these have ended, the other tasks get SIGTERM
        self._outcome = JobOutcome()
        self._signalled_at = 0.0

    def run(self, *, after: float = 0.0) -> JobOutcome:
        """Start every task `after` seconds from now; return when no process of the job is left."""
        try:
            if self._pause(after):
                self._start(list(self._commands))
                self._watch()
        finally:
            self._end()
        return self._outcome

    def handle(self, task: Task) -> TaskHandle | None:
        """The handle of a task, or None before it is started."""
        return self._children.get(task)

    def _pause(self, seconds: float) -> bool:
        until = self._clock.now() + seconds
        while True:
            left = until - self._clock.now()
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

    def _start(self, tasks: Sequence[Task]) -> None:
        commands = {task: self._commands[task] for task in tasks}
        if self._spares is not None:
            taken = {task: self._spares.take(command) for task, command in commands.items()}
            self._children |= {task: spare for task, spare in taken.items() if spare is not None}
            commands = {task: command for task, command in commands.items() if taken[task] is None}
        if commands:
            started = self._launcher.start(list(commands.values()))
            self._children |= dict(zip(commands, started, strict=True))
        for task in tasks:
            self._session.say(self._policy.on_start(task, self._children[task].pid))

    def _watch(self) -> None:
        while self._due or not self._announced.issuperset(self._children.values()):
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
        if isinstance(event, TaskHandle):
            self._announced.add(event)
            self._on_exit()
        elif isinstance(event, Request):
            self._on_request(event)
        elif not isinstance(event, int):
            self._note(event)
        elif event:
            self._on_signal(event)

    def _note(self, event: Event) -> None:
        if not isinstance(event, TaskHandle | Request | int):
            self._policy.on_message(event)

    def _on_exit(self) -> None:
        if self._others_after and not self._running(self._others_after):
            self._others_after = ()
            self._stop(signal.SIGTERM)
        ended = [child for child in self._children.values() if child.ended_at and child not in self._judged]
        for child in sorted(ended, key=lambda child: child.ended_at):
            if self._kill_at is not None or self._linger_until is not None:
                return  # the job is ending, so these exits mean nothing
            if child not in self._announced:
                return  # exits are judged in their order, each after all messages of its task
            self._judged.add(child)
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
                self._failed = task, self._clock.now() + decision.after, decision
            else:
                self._fail(task, decision)
        elif decision.action == "finish":
            self._due.clear()
            self._failed = None  # the job has succeeded before the failure was acted on
            self._linger_until = self._clock.now() + decision.after
        elif decision.action == "restart" and task is not None:
            self._children[task].join_output(0.0)
            self._due[task] = self._clock.now() + decision.after
        elif decision.action == "signal":
            for member, pid in decision.pids.items():
                # The task has reported this id, so it may be wrong; `signal_member` rejects foreign ones.
                self._children[member].signal_member(pid, decision.signum)

    def _fail(self, task: Task, decision: Decision) -> None:
        self._outcome.first_failure = task
        self._outcome.reason = decision.reason
        self._waiting = decision.action == "wait"
        if self._waiting:
            self._kill_at = self._clock.now() + decision.after
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
            child.signal(signal.SIGKILL)

    def _on_signal(self, signum: int) -> None:
        if self._outcome.signal is None:
            self._outcome.signal = signum
            self._signalled_at = self._clock.now()
            if self._waiting:
                return  # the tasks are saving and ending by themselves; a signal could interrupt a save
            # Slurm's notice (SIGUSR1) and a closed output stream (SIGPIPE) also mean that the job should end.
            forwarded = signal.SIGTERM if signum in (signal.SIGPIPE, signal.SIGUSR1) else signum
            running = self._running(self._children)
            first = self._policy.signalled_first(signum, running)
            self._stop(forwarded, first)
            self._others_after = first if len(first) < len(running) else ()
        elif signum != signal.SIGPIPE and not self._is_same_notice(signum):
            self._stop(signal.SIGKILL)

    def _is_same_notice(self, signum: int) -> bool:
        """Whether a scheduler has sent one notice to several processes or hosts of the job."""
        return signum in NOTICES and self._clock.now() - self._signalled_at < _ONE_NOTICE

    def _check(self) -> None:
        if self._kill_at is None and self._linger_until is None and self._failed is None:
            due = self._policy.next_check()
            if due is not None and self._clock.now() >= due:
                self._follow(None, self._policy.check())

    def _on_deadline(self) -> None:
        now = self._clock.now()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._stop(signal.SIGKILL)
        elif self._linger_until is not None:
            if now >= self._linger_until:
                self._stop(signal.SIGTERM)
        elif self._failed is not None:
            task, due, decision = self._failed
            if now >= due:
                self._failed = None
                self._follow(task, self._policy.on_delay_end(task, decision))
        elif self._deadline is not None and now >= self._deadline:
            self._outcome.timed_out = tuple(t for t, c in self._children.items() if c.exit_code is None)
            self._stop(signal.SIGTERM)
        else:
            for task in [task for task, due in self._due.items() if now >= due]:
                del self._due[task]
                self._commands[task] = self._policy.again(self._commands[task])
                self._start([task])

    def _running(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if self._children[task].exit_code is None]

    def _stop(self, signum: int, tasks: Iterable[Task] | None = None) -> None:
        self._due.clear()
        for task in self._running(self._children if tasks is None else tasks):
            self._children[task].signal(signum)
        patience = 1.0 if signum == signal.SIGKILL else self._policy.grace()
        self._kill_at = self._clock.now() + patience

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [self._kill_at]
        if self._kill_at is None:
            failing = None if self._failed is None else self._failed[1]
            deadlines = [self._linger_until, failing, self._deadline, *self._due.values()]
            if self._linger_until is None and failing is None:
                deadlines.append(self._policy.next_check())
        nearest = min((at for at in deadlines if at is not None), default=None)
        return None if nearest is None else max(0.0, nearest - self._clock.now())

    def _end(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        self._launcher.kill_rest()
        for task, child in self._children.items():
            child.join_output()
            self._outcome.exit_codes[task] = -signal.SIGKILL if child.exit_code is None else child.exit_code
            self._outcome.tails[task] = list(child.tail)
        for event in self._session.remaining_events():
            if isinstance(event, int) and event and self._outcome.signal is None:
                self._outcome.signal = event
            self._note(event)
