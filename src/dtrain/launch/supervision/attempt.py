"""One attempt of a job that may be restarted: the state of its tasks, common to both kinds of jobs.

What a task's exit means is decided in `synchronous` and `parameter_servers`; whether another attempt follows,
in `restarts`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.base.clock import Clock
from dtrain.base.tcp import split_address
from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.policy import GO_ON, Decision, Policy
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_handle import Event, TaskHandle
from dtrain.launch.supervision.connections import Connections
from dtrain.launch.supervision.rendezvous_watch import RendezvousWatch
from dtrain.launch.supervision.task_states import TaskStates
from dtrain.task.channel import RUN_AGAIN
from dtrain.task.task_messages import (
    CheckpointNote,
    ConnectedNote,
    FailureNote,
    Message,
    Progress,
    RemoveNote,
)

SAVING_GRACE = 30.0
"""Seconds that tasks which write checkpoints get to save one and exit."""


_TAKEN = 5.0  # seconds within which the tasks of a job that is stuck take the signal to dump their stacks
_DUMPED = 1.0  # seconds that a task has to write its stacks once it has taken the signal
_LOOK = 0.1  # seconds between two looks whether all have taken it


@dataclass
class _StuckAttempt:
    """An attempt that ends as soon as its tasks have dumped their stacks.

    Attributes:
        decision: how it ends.
        waits_for: the tasks that have not taken the signal to dump them, each with the process that gets it.
        next_check: when to look whether they have, or to end the attempt.
        ends_at: when to end it.
    """

    decision: Decision
    waits_for: Mapping[Task, int]
    next_check: float
    ends_at: float


@dataclass
class JobRecord:
    """What the tasks of a job have reported, over all attempts.

    Attributes:
        connections: whether the tasks ever connected to each other.
        reported: whether any task ever reported progress.
        stepped: whether any task ever completed a step.
        folder: the folder of the checkpoints, or None if no task has named one.
        checkpoint: the step of the newest checkpoint; -1 for none.
        removals: the folders to delete when the job has succeeded.
        gone: the tasks that reported progress in earlier attempts, each with the id of its process.
        states: what each task of the present attempt does, for a page.
    """

    connections: Connections
    reported: bool = False
    stepped: bool = False
    folder: str | None = None
    checkpoint: int = -1
    removals: list[str] = field(default_factory=list)
    gone: set[tuple[Task, int]] = field(default_factory=set)
    states: TaskStates = field(default_factory=TaskStates)

    def note_all(self, events: Iterable[Event]) -> None:
        """Record the messages about checkpoints and connections; ignore all other events."""
        for event in events:
            if isinstance(event, RemoveNote):
                self.removals.append(event.path)
            elif isinstance(event, ConnectedNote):
                self.connections.made = True
            elif isinstance(event, CheckpointNote):
                self.folder = event.folder
                self.checkpoint = max(self.checkpoint, event.step)


class AttemptPolicy(Policy):
    """The policy that both kinds of jobs share.

    It tracks the tasks' messages, and treats a task that does not make its strategy, while others wait for
    it, as failed.

    Args:
        spec: the job.
        record: what its tasks have reported, over all attempts.
        topologies: the topology of each task.
        clock: the session's.
    """

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        topologies: Sequence[Topology],
        clock: Clock,
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.record = record
        self.addresses = {topology.task: topology.address for topology in topologies}
        self.find: Callable[[Task], TaskHandle | None] = lambda task: None
        self.failures: dict[Task, FailureNote] = {}
        self.latest: dict[Task, Progress] = {}
        self.answers_signals = False  # whether a task reported that it saves a checkpoint on SIGTERM
        self._rendezvous = RendezvousWatch(spec.start_timeout, clock)
        self._stuck: _StuckAttempt | None = None

    @property
    def progressed(self) -> bool:
        """Whether any task has completed a step in this attempt."""
        return any(latest.done > 0 for latest in self.latest.values())

    @property
    def reached(self) -> int:
        """The step that the first task has reached in this attempt; 0 if it has completed none.

        A run's record is of the first task. Workers that train alone may be ahead of it.
        """
        latest = self.latest.get(next(iter(self.addresses)))
        return latest.step if latest is not None and latest.done else 0

    def step_of(self, task: Task) -> int | None:
        """The training step that a task has reached; None until it has completed one in this attempt."""
        latest = self.latest.get(task)
        return latest.step if latest is not None and latest.done else None

    def lost_peer(self, task: Task) -> bool:
        """Whether a task has reported that it fails because a peer is gone or cannot be reached."""
        note = self.failures.get(task)
        return note is not None and note.lost_peer

    def close(self) -> None:
        """End the attempt: progress that its processes reported, but that arrives later, is ignored."""
        self.record.gone.update((latest.task, latest.pid) for latest in self.latest.values())

    def on_start(self, task: Task, pid: int) -> str:
        """A task was started, perhaps again: forget what its earlier process reported."""
        self.failures.pop(task, None)
        self.record.gone.discard((task, pid))  # another host may use the same number
        self._rendezvous.started(task)
        self.record.states.started(task)
        return ""

    def on_message(self, message: Message) -> None:
        """Receive a task's message."""
        if isinstance(message, Progress):
            if (message.task, message.pid) not in self.record.gone:
                self.on_progress(message)
        elif isinstance(message, FailureNote):
            self.failures[message.task] = message
        else:
            self._rendezvous.note(message)
            self.record.note_all([message])
            self.answers_signals |= isinstance(message, CheckpointNote)

    def on_progress(self, progress: Progress) -> None:
        """A task has reported its progress."""
        self.latest[progress.task] = progress
        self.record.states.progressed(progress)
        self._rendezvous.trains(progress.task)
        self.record.reported = True
        self.record.stepped |= progress.done > 0

    def on_exit(self, task: Task, code: int) -> Decision:
        """Record a task's exit and decide what it means."""
        self._rendezvous.ended(task, code)
        self.record.states.ended(task, code)
        decision = self.decide_after_exit(task, code)
        if self._stuck is not None and code not in (0, RUN_AGAIN):
            return self._stuck.decision  # it may have ended because of the stuck task, or of the signal
        return decision

    def decide_after_exit(self, task: Task, code: int) -> Decision:
        """Decide what a task's exit means; each kind of job implements this."""
        raise NotImplementedError

    def next_check(self) -> float | None:
        """When to check connections and the rendezvous next, or to end an attempt that is stuck."""
        if self._stuck is not None:
            return self._stuck.next_check
        times = (self.record.connections.next_check(), self._rendezvous.next_check())
        return min((at for at in times if at is not None), default=None)

    def check(self) -> Decision:
        """Check connections and the rendezvous; end an attempt that is stuck."""
        if self._stuck is not None:
            return self._end_when_dumped(self._stuck)
        ports = [split_address(address)[1] for address in self.addresses.values()]
        self.record.connections.check(map(self.find, self.addresses), ports)
        decision = self._rendezvous.check(self.addresses, self.find)
        late = self._rendezvous.late(self.addresses, self.find) if decision is GO_ON else None
        if late is None:
            return decision
        running = {task: handle for task in self.addresses if (handle := self.find(task)) is not None}
        # All tasks are about to be ended, so one that does not know the signal may be ended by it.
        everyone = {task: handle.pid for task, handle in running.items() if handle.exit_code is None}
        return self.stuck(late, f"{late.task} {late.reason}.", {**everyone, **self.reporting()})

    def stuck(self, decision: Decision, line: str, pids: Mapping[Task, int]) -> Decision:
        """Have tasks dump their stacks, and carry out a decision as soon as they have.

        A task that has been stopped for a moment dumps its stacks when it runs again, so it is waited for.

        Args:
            decision: how the attempt ends then.
            line: the line to show now.
            pids: the tasks that dump their stacks, each with its process.
        """
        now = self.clock.now()
        self._stuck = _StuckAttempt(decision, pids, next_check=now, ends_at=now + _TAKEN)
        return Decision("signal", signum=signal.SIGUSR2, pids=pids, line=line)

    def _end_when_dumped(self, stuck: _StuckAttempt) -> Decision:
        now = self.clock.now()
        if now < stuck.ends_at and stuck.waits_for:
            stuck.waits_for = {
                task: pid
                for task, pid in stuck.waits_for.items()
                if (process := self.find(task)) is not None
                and process.exit_code is None
                and not process.has_taken(pid, signal.SIGUSR2)
            }
            if not stuck.waits_for:
                stuck.ends_at = now + _DUMPED
        stuck.next_check = min(now + _LOOK, stuck.ends_at) if stuck.waits_for else stuck.ends_at
        return GO_ON if now < stuck.ends_at else stuck.decision

    def reporting(self) -> dict[Task, int]:
        """The tasks that run and have reported progress, each with the process that did."""
        return {
            task: latest.pid
            for task, latest in self.latest.items()
            if (process := self.find(task)) is not None and process.exit_code is None
        }

    def grace(self) -> float:
        """The user's `grace`; by default, long enough to save if the tasks write checkpoints."""
        if self.spec.grace is not None:
            return self.spec.grace
        return SAVING_GRACE if self.record.folder is not None else super().grace()
