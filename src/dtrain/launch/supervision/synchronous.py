"""Jobs in which every worker is needed: after a failure, all workers are restarted from the last checkpoint.

This module decides what a worker's exit means and which workers the next attempt has. `restarts` runs the
attempts; the program itself loads the checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dtrain.base.clock import Clock
from dtrain.base.tcp import split_address
from dtrain.environments import settings
from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.launcher import Launcher
from dtrain.launch.job.policy import GO_ON, Decision
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_environment import worker_tasks
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.supervision.attempt import SAVING_GRACE, AttemptPolicy, JobRecord
from dtrain.launch.supervision.membership import Membership
from dtrain.launch.supervision.reports import trace
from dtrain.launch.supervision.restart_rules import (
    USAGE,
    Budget,
    Failure,
    RestartDecision,
    RestartRules,
    back_off,
)
from dtrain.launch.supervision.restarts import RestartedJob
from dtrain.launch.supervision.running_tasks import JobOutcome
from dtrain.launch.supervision.spares import Spares
from dtrain.launch.supervision.watchdog import Watchdog
from dtrain.task.channel import RUN_AGAIN
from dtrain.task.task_messages import ImportsNote, Message, Progress

_BLAME = 0.5  # seconds to wait for the exit of the task that caused another task's failure
_NO_NEWS = 30.0  # seconds after which a job that reports no progress is assumed to have started


class SynchronousPolicy(AttemptPolicy):
    """One attempt of a job in which every worker is needed.

    - A worker exits with 0: the others continue.
    - A worker exits with `RUN_AGAIN`, after saving a checkpoint: the others get time to do the same.
    - A worker fails: the others cannot continue without it and are killed at once. They get the usual grace
      if the job will not be restarted: it allows no restarts, was called wrongly, or raised before any step
      an error that is not about a peer.
    - A worker fails because it lost a peer: a peer is blamed that fails soon after, or is stopped even then.
    - No progress for too long: all tasks dump their stacks, and the stuck one counts as failed.

    Args:
        spec, record, topologies, clock: as for `AttemptPolicy`.
        places: the place of each worker, by its index.
        members: the present and absent places of the job.
        spares: the job's spare processes, started once every worker has completed a step.
        silent_failures, slots: as for `Launcher`.
    """

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        topologies: Sequence[Topology],
        clock: Clock,
        places: Sequence[int],
        members: Membership,
        spares: Spares,
        *,
        silent_failures: bool = False,
        slots: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(spec, record, topologies, clock)
        self.places = places
        self._members = members
        self._watchdog = Watchdog(spec.hang_timeout, clock, self._stopped)
        self._spares = spares
        self._silent_failures = silent_failures
        self._slots = slots
        self._began_at = self.clock.now()
        self._asked = False
        self._pids: dict[Task, int] = {}

    def started(self, task: Task) -> bool:
        """Whether a worker has started to train.

        That is a completed step; if no task of the job reports any, 30 s of run time.
        """
        if task in self.latest:
            return self.latest[task].done > 0
        return not self.record.stepped and self.clock.now() - self._began_at >= _NO_NEWS

    def on_start(self, task: Task, pid: int) -> str:
        """A task was started; once all are, a line shows the process ids to the user."""
        super().on_start(task, pid)
        self._watchdog.on_start(task, pid)
        self._pids[task] = pid
        return self._started_line() if self._pids.keys() == self.addresses.keys() else ""

    def _started_line(self) -> str:
        hosts = {task: split_address(address)[0] for task, address in self.addresses.items()}
        several = len({*hosts.values()}) > 1
        named = [
            f"{task} (process {pid}{f' on {hosts[task]}' if several else ''})"
            for task, pid in self._pids.items()
        ]
        return f"Started: {', '.join(named)}."

    def on_message(self, message: Message) -> None:
        """Receive a task's message; the imports that a task reports are for the spares."""
        if isinstance(message, ImportsNote):
            self._spares.note_imports(message)
        super().on_message(message)

    def on_progress(self, progress: Progress) -> None:
        """A task has reported its progress; once all tasks train, spares may be started."""
        super().on_progress(progress)
        self._watchdog.on_progress(progress)
        if progress.done:
            if progress.task.index < len(self.places):
                self._members.works([self.places[progress.task.index]])
            if not self._spares.allowed and self._all_at_work():
                self._spares.allow()

    def decide_after_exit(self, task: Task, code: int) -> Decision:
        """Decide what a worker's exit means; see the class."""
        self._watchdog.on_exit(task)
        if code == 0:
            return GO_ON
        if code == RUN_AGAIN:
            return Decision("wait", after=SAVING_GRACE if self.spec.grace is None else self.spec.grace)
        own_error = code > 0 and not self.record.stepped and not self.lost_peer(task)
        if code == USAGE or not self.spec.restarts or own_error:
            return Decision("fail")
        return Decision("kill", after=_BLAME if self._lost_peer(task, code) else 0.0)

    def on_further_exit(self, first: Task, task: Task, code: int) -> Decision:
        """Blame the second task, unless it failed because it lost a peer."""
        self._watchdog.on_exit(task)
        return Decision("kill", task=first if self._lost_peer(task, code) else task)

    def on_delay_end(self, first: Task, decision: Decision) -> Decision:
        """Blame a stopped task; one that was stopped for a moment is running again."""
        for other in self.addresses:
            process = self.find(other)
            if other != first and process is not None and process.exit_code is None and process.stopped():
                line = f"{other} is stopped (SIGSTOP): {first} failed because of it."
                return Decision("kill", task=other, line=line, reason="was stopped, and was killed")
        return super().on_delay_end(first, decision)

    def _lost_peer(self, task: Task, code: int) -> bool:
        silent = self._silent_failures and task not in self.failures
        return code > 0 and (silent or self.lost_peer(task))

    def _stopped(self, task: Task, pid: int) -> bool:
        process = self.find(task)
        return process is not None and process.stopped(pid)

    def next_check(self) -> float | None:
        """When the rendezvous, the watchdog, a spare or an absent worker needs the next check."""
        if self._stuck is not None:
            return super().next_check()
        times = [super().next_check(), self._watchdog.next_check(), self._spares.next_check()]
        if self._may_ask():
            times.append(self._next_return())
        if not self.record.reported and not self._spares.allowed:
            times.append(self._began_at + _NO_NEWS)
        return min((at for at in times if at is not None), default=None)

    def check(self) -> Decision:
        """Look for a hung or slow task, start a spare, end the attempt if an absent worker may return."""
        if self._stuck is not None:
            return super().check()
        now = self.clock.now()
        self._spares.maintain()
        decision = super().check()
        if decision is not GO_ON:
            return decision
        if not self.record.reported and not self._spares.allowed and now >= self._began_at + _NO_NEWS:
            self._spares.allow()
        diagnosis = self._watchdog.check()
        if diagnosis is not None and diagnosis.kind == "hung":
            decision = Decision("kill", task=diagnosis.task, reason="was stuck, and was killed")
            return self.stuck(decision, diagnosis.line, self.reporting())
        if diagnosis is not None:
            return Decision("go on", line=diagnosis.line)
        back_at = self._next_return()
        if self._may_ask() and back_at is not None and now >= back_at:
            self._asked = True
            line = "Tasks are asked to save and to end, so that the absent workers can be tried again."
            return Decision("signal", signum=signal.SIGUSR1, pids=self.reporting(), line=line)
        return GO_ON

    def _next_return(self) -> float | None:
        """When the job can next have more workers than this attempt; None if that is not known."""
        slots = self._slots()
        if slots is not None and slots <= len(self.places):
            return None
        if len(self._members.present()) > len(self.places):  # some were left out, because hosts were missing
            return self._began_at
        return self._members.next_return()

    def _may_ask(self) -> bool:
        """Whether every worker would now answer a request to save a checkpoint and exit."""
        return self.answers_signals and not self._asked and self._all_at_work()

    def _all_at_work(self) -> bool:
        # A task outside of fit answers no request to save.
        return len(self.latest) == len(self.places) and all(
            p.done and p.train and p.phase != "idle" for p in self.latest.values()
        )


class SynchronousJob(RestartedJob):
    """A job of workers only. In each attempt, the launcher assigns new addresses.

    Args:
        spec: the job.
        launcher: starts the tasks.
    """

    def __init__(self, spec: JobSpec, launcher: Launcher) -> None:
        clock = launcher.session.clock
        super().__init__(spec, launcher, spec.workers, RestartRules(Budget(spec.restarts, clock)))
        self.common["DTRAIN_WORKERS_MAX"] = str(spec.workers)
        self._members = Membership(
            spec.min_workers or spec.workers, spec.workers, rejoin=settings.rejoin_seconds(), clock=clock
        )
        self.spares: Spares = Spares(spec.command, self.common, spec.spare_count, launcher)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """End the spares at the end of the job."""
        try:
            yield
        finally:
            self.spares.close()

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[tuple[AttemptPolicy, Sequence[TaskCommand]]]:
        """One attempt with the present workers, and with the absent ones that are due for another try."""
        for place in self._members.readmit():
            present = len(self._members.present())
            self.session.say(f"The absent worker (place {place}) is tried again: {present} workers.")
        places = self._members.present()
        tasks = worker_tasks(len(places))
        self.spares.hold()
        with self.launcher.assign(tasks, self.common) as assigned:
            if len(assigned) < len(places):
                line = f"There is room for {len(assigned)} of {len(places)} workers"
                self.session.say(f"{line}: the job continues with {len(assigned)}.")
                places = places[: len(assigned)]
            attempt = SynchronousPolicy(
                self.spec,
                self.record,
                [assignment.topology for assignment in assigned],
                self.session.clock,
                places,
                self._members,
                self.spares,
                silent_failures=self.launcher.silent_failures,
                slots=self.launcher.slots,
            )
            yield (
                attempt,
                [
                    self.command(assignment, number, self._of_place(place))
                    for assignment, place in zip(assigned, places, strict=True)
                ],
            )

    def _of_place(self, place: int) -> dict[str, str]:
        """The variables that tell a task its place and select its GPU."""
        own = {"CUDA_VISIBLE_DEVICES": self.spec.gpus[place]} if self.spec.gpus else {}
        return {"DTRAIN_PLACE": str(place), **own}

    def decide(self, failure: Failure, attempt: AttemptPolicy) -> RestartDecision:
        """Decide whether another attempt follows.

        In an elastic job, a worker that was killed or failed before its first step is tried once more, then
        left out. All other failures are judged by `RestartRules`.
        """
        members = self._members
        broken = failure.code in (0, USAGE) or (failure.code > 0 and not failure.stepped)
        if broken or not members.elastic or not isinstance(attempt, SynchronousPolicy):
            return super().decide(failure, attempt)
        if attempt.started(failure.task):
            return super().decide(failure, attempt)
        place = attempt.places[failure.task.index]
        if not members.failed_to_start(place):
            # This restart needs no budget: if the worker fails again, it is left out, so there is no loop.
            delay = back_off(1)
            return RestartDecision(
                True, delay, f"It is tried once more: all are started again in {delay:g} s"
            )
        if not members.can_lose_one():
            left = len(members.present()) - 1
            line = f"It does not start. The job needs {members.fewest} workers, and {left} would be left"
            return RestartDecision(False, 0.0, f"{line} (--workers {members.fewest}:{members.most}).")
        seconds = members.give_up(place)
        number = f"{len(members.present())} of {members.most} workers"
        later = f"the absent one (place {place}) is tried again after {seconds:g} s"
        return RestartDecision(True, 0.0, f"It does not start: {later}. The job continues with {number}")

    def introduced(self, outcome: JobOutcome, failure: Failure) -> str:
        """Show the failed task's last lines if it exited by itself; returns the start of the restart line."""
        self.show(trace(outcome))
        return f"{failure}. "

    def from_where(self) -> str:
        """The end of the restart line: the checkpoint that training resumes from, or why there is none."""
        record = self.record
        if record.folder is None and not record.reported:
            return (
                ", from the beginning: it has saved nothing yet, and "
                "completed no step (checkpoints: dtrain.BackupAndRestore)"
            )
        if record.folder is None:
            return ", from the beginning: the program saves no checkpoints (dtrain.BackupAndRestore)"
        if record.checkpoint < 0:
            return f", from the beginning: there is no checkpoint in {record.folder} yet"
        checkpoint = f"from the checkpoint of step {record.checkpoint} in {record.folder}"
        gone = "://" not in record.folder and Path(record.folder).is_absolute()
        if gone and not Path(record.folder).exists():
            return f", from the beginning, not {checkpoint}: the folder is gone"
        return f", {checkpoint}"
