"""One attempt of a job that may be started again: what its tasks have said until now, whatever its kind.

What the end of a task means is each kind's own, in `synchronous` and `parameter_servers`; whether there is
another attempt is decided in `restarts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dtrain.launch.connections import Connections
from dtrain.launch.policy import Decision, Policy
from dtrain.launch.rendezvous_watch import RendezvousWatch
from dtrain.launch.spec import JobSpec
from dtrain.launch.task_process import Event, TaskProcess
from dtrain.task_messages import CheckpointNote, ConnectedNote, FailureNote, Message, Progress, RemoveNote
from dtrain.topology import Task, Topology, split_address

SAVING_GRACE = 30.0
"""Seconds that tasks which keep checkpoints have to save one and to end."""


@dataclass
class JobRecord:
    """What the tasks of a job have said, over all attempts.

    Attributes:
        connections: whether the tasks ever connected to each other.
        reported: whether any ever reported progress.
        stepped: whether any ever completed a step.
        folder: where checkpoints are, or None.
        checkpoint: the step of the newest one; -1 for none.
        removals: what to delete when the job has ended well.
        gone: the processes that reported in earlier attempts.
    """

    connections: Connections
    reported: bool = False
    stepped: bool = False
    folder: str | None = None
    checkpoint: int = -1
    removals: list[str] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def note_all(self, events: Iterable[Event]) -> None:
        """Remember what is said of checkpoints and connections."""
        for event in events:
            if isinstance(event, RemoveNote):
                self.removals.append(event.path)
            elif isinstance(event, ConnectedNote):
                self.connections.made = True
            elif isinstance(event, CheckpointNote):
                self.folder = event.folder
                self.checkpoint = max(self.checkpoint, event.step)


class Attempt(Policy):
    """What both kinds have in common. A task for which others wait in vain has failed.

    Args:
        spec: the job.
        record: what is known of it.
        topologies: those of its tasks.
        hang_timeout: seconds after which a task that does not come to the rendezvous hangs, or None.
    """

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        topologies: Sequence[Topology],
        hang_timeout: float | None = None,
    ) -> None:
        self.spec = spec
        self.record = record
        self.addresses = {each.task: each.address for each in topologies}
        self.find: Callable[[Task], TaskProcess | None] = lambda task: None
        self.failures: dict[Task, FailureNote] = {}
        self.latest: dict[Task, Progress] = {}
        self.answers_signals = False  # whether a task said that it saves when it is told to end
        self._rendezvous = RendezvousWatch(hang_timeout)

    @property
    def progressed(self) -> bool:
        """Whether any task has completed a step in this attempt."""
        return any(latest.done > 0 for latest in self.latest.values())

    def step_of(self, task: Task) -> int | None:
        """The training step at which a task is; None before it has completed one in this attempt."""
        latest = self.latest.get(task)
        return latest.step if latest is not None and latest.done else None

    def close(self) -> None:
        """Forget the processes: what one of them may yet be heard to say counts no more."""
        self.record.gone.update(latest.pid for latest in self.latest.values())

    def on_start(self, task: Task, pid: int) -> str:
        """Forget an earlier life of this task."""
        self.failures.pop(task, None)
        self._rendezvous.started(task)
        return ""

    def on_message(self, message: Message) -> None:
        """Take note of it."""
        if isinstance(message, Progress):
            if message.pid not in self.record.gone:
                self.on_progress(message)
        elif isinstance(message, FailureNote):
            self.failures[message.task] = message
        else:
            self._rendezvous.note(message)
            self.record.note_all([message])
            self.answers_signals |= isinstance(message, CheckpointNote)

    def on_progress(self, progress: Progress) -> None:
        """A task has reported where it is."""
        self.latest[progress.task] = progress
        self.record.reported = True
        self.record.stepped |= progress.done > 0

    def on_exit(self, task: Task, code: int) -> Decision:
        """Take note of it, and judge."""
        self._rendezvous.ended(task, code)
        return self.judge_exit(task, code)

    def judge_exit(self, task: Task, code: int) -> Decision:
        """The meaning of a task's end."""
        raise NotImplementedError

    def next_check(self) -> float | None:
        """When connections and rendezvous are to be looked at."""
        times = (self.record.connections.next_look(), self._rendezvous.next_check())
        return min((at for at in times if at is not None), default=None)

    def check(self) -> Decision:
        """Look at them."""
        ports = [split_address(address)[1] for address in self.addresses.values()]
        self.record.connections.look(map(self.find, self.addresses), ports)
        return self._rendezvous.check(self.addresses, self.find)

    def grace(self) -> float:
        """The user's; or enough to save for those who keep checkpoints."""
        if self.spec.grace is not None:
            return self.spec.grace
        return SAVING_GRACE if self.record.folder is not None else super().grace()
