"""One attempt of a synchronous job: who has got how far, who hangs, and what the end of a task means.

It decides while the processes run; whether there is another attempt is decided in `synchronous`.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dtrain.channel import (
    RUN_AGAIN,
    CheckpointNote,
    ConnectedNote,
    MeetingNote,
    Message,
    Progress,
    RemoveNote,
)
from dtrain.launch.connections import Connections
from dtrain.launch.meeting import Meeting
from dtrain.launch.members import Members
from dtrain.launch.policy import GO_ON, SAVING_GRACE, Decision, Policy, saving_grace
from dtrain.launch.reports import exception_in
from dtrain.launch.restart_rules import USAGE
from dtrain.launch.spares import Spares
from dtrain.launch.task_process import Event, TaskProcess
from dtrain.launch.watchdog import Watchdog
from dtrain.topology import Task

_STACKS = 1.0  # seconds for the stacks of a stuck job to be written
_BLAME = 0.5  # seconds for the task to end that is the cause of another's failure
_NO_NEWS = 30.0  # seconds after which a job that reports nothing has surely started
_LOST_PEER = re.compile(
    r"\b(Unavailable|Aborted|Cancelled|DeadlineExceeded|PeerMissing)Error\b|Connection reset|Socket closed"
    r"|\bMPI_ERR_(OTHER|INTERN|UNKNOWN|PROC_FAILED|PROC_FAILED_PENDING|REVOKED)\b"
)


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

    def note(self, message: CheckpointNote | RemoveNote | ConnectedNote) -> None:
        """Remember what is said of checkpoints and connections."""
        if isinstance(message, RemoveNote):
            self.removals.append(message.path)
        elif isinstance(message, ConnectedNote):
            self.connections.note(message)
        else:
            self.folder = message.folder
            self.checkpoint = max(self.checkpoint, message.step)

    def note_all(self, events: Iterable[Event]) -> None:
        """Remember the last words of tasks that are gone."""
        for event in events:
            if isinstance(event, CheckpointNote | RemoveNote | ConnectedNote):
                self.note(event)


class Attempt(Policy):
    """Of a job in which every worker is needed.

    - A worker ends with 0: the others go on. With `RUN_AGAIN`: the others do so as well, and get time for it.
    - A worker fails: the others cannot go on without it, and are killed at once. They get the usual grace
      where the job is not started again: it was called wrongly, or raised before any step.
    - A worker fails because it lost another: that one is to blame, if it is stopped or has failed as well.
    - No progress for too long: the stacks of all are dumped, and the one that is stuck has failed.

    Args:
        places: the place of each worker, by its index.
        record: what is known of the job.
        members: the places, of which absent ones are waited for.
        watchdog: finds the one that is stuck.
        spares: processes in waiting, started once this attempt has made its first step.
        restarts: whether the job may be started again.
        grace: seconds given by the user, or None.
        over_mpi: whether the workers are ranks of an MPI start.
    """

    def __init__(
        self,
        places: Sequence[int],
        record: JobRecord,
        members: Members,
        watchdog: Watchdog,
        spares: Spares,
        *,
        restarts: bool,
        grace: float | None,
        over_mpi: bool = False,
    ) -> None:
        self.places = places
        self._record = record
        self._members = members
        self._watchdog = watchdog
        self._spares = spares
        self._restarts = restarts
        self._grace = grace
        self._over_mpi = over_mpi
        self._began_at = time.monotonic()
        self._find: Callable[[Task], TaskProcess | None] = lambda task: None
        self._ports: Collection[int] = ()
        self._tasks: list[Task] = []
        self._latest: dict[Task, Progress] = {}
        self._answers_signals = False
        self._asked = False
        self._stuck: tuple[Task, float] | None = None
        self._meeting = Meeting(watchdog.hang_timeout)

    def look_up(self, find: Callable[[Task], TaskProcess | None], ports: Collection[int]) -> None:
        """Set how the process of a task is found, and on which ports the tasks serve."""
        self._find = find
        self._ports = ports

    @property
    def progressed(self) -> bool:
        """Whether any worker has completed a step in this attempt."""
        return any(latest.done > 0 for latest in self._latest.values())

    def started(self, task: Task) -> bool:
        """Whether a worker has completed a step; where none ever tells, whether it has run for long."""
        if task in self._latest:
            return self._latest[task].done > 0
        return not self._record.stepped and time.monotonic() - self._began_at >= _NO_NEWS

    def step_of(self, task: Task) -> int | None:
        """The training step at which a worker is; None before it has completed one in this attempt."""
        latest = self._latest.get(task)
        return latest.step if latest is not None and latest.done else None

    def close(self) -> None:
        """Forget the processes: what one of them may yet be heard to say counts no more."""
        self._record.gone.update(latest.pid for latest in self._latest.values())

    def on_start(self, task: Task, pid: int) -> str:
        """Nothing is shown."""
        self._tasks.append(task)
        self._watchdog.on_start(task, pid)
        self._meeting.started(task)
        return ""

    def on_message(self, message: Message) -> None:
        """Take note of it."""
        if isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, MeetingNote):
            self._meeting.note(message)
        elif isinstance(message, CheckpointNote | RemoveNote | ConnectedNote):
            self._record.note(message)
            self._meeting.note(message)
            self._answers_signals |= isinstance(message, CheckpointNote)

    def _on_progress(self, progress: Progress) -> None:
        if progress.pid in self._record.gone:
            return
        self._watchdog.on_progress(progress)
        self._latest[progress.task] = progress
        self._record.reported = True
        if progress.done:
            self._record.stepped = True
            if progress.task.index < len(self.places):
                self._members.works([self.places[progress.task.index]])
            if not self._spares.allowed and self._all_at_work():
                self._spares.allow()

    def on_exit(self, task: Task, code: int, tail: Sequence[str] = ()) -> Decision:
        """As the class says."""
        self._watchdog.on_exit(task)
        self._meeting.ended(task, code)
        if code == 0:
            return GO_ON
        if code == RUN_AGAIN:
            return Decision("wait", after=self.grace(SAVING_GRACE))
        for other in self._tasks:
            process = self._find(other)
            if other != task and process is not None and process.exit_code is None and process.stopped():
                line = f"{other} is stopped (SIGSTOP): {task} failed because of it."
                return Decision("kill", task=other, line=line, reason="was stopped, and was killed")
        if code == USAGE or not self._restarts or (code > 0 and not self._record.stepped):
            return Decision("fail")
        if self._lost_peer(code, tail):
            return Decision("kill", after=_BLAME)
        return Decision("kill")

    def on_further_exit(self, first: Task, task: Task, code: int, tail: Sequence[str] = ()) -> Decision:
        """Whoever lost a peer is not to blame while there is another."""
        self._watchdog.on_exit(task)
        return Decision("kill", task=first if self._lost_peer(code, tail) else task)

    def _lost_peer(self, code: int, tail: Sequence[str]) -> bool:
        exception = exception_in(tail)
        if exception is None:  # MPI libraries end a rank whose peer is gone, without Python's knowing
            return code > 0 and self._over_mpi
        return code > 0 and _LOST_PEER.search(exception) is not None

    def next_check(self) -> float | None:
        """When the watchdog, a spare, or an absent worker is to be looked after."""
        if self._stuck is not None:
            return self._stuck[1]
        connections = self._record.connections
        times = [self._watchdog.next_check(), self._spares.next_check(), connections.next_look()]
        times.append(self._meeting.next_check())
        if self._may_ask():
            times.append(self._members.next_return())
        if not self._record.reported and not self._spares.allowed:
            times.append(self._began_at + _NO_NEWS)
        return min((at for at in times if at is not None), default=None)

    def check(self) -> Decision:
        """See who hangs, start a spare, ask for the place of an absent worker."""
        now = time.monotonic()
        if self._stuck is not None:
            reason = "was stuck, and was killed"
            return GO_ON if now < self._stuck[1] else Decision("kill", task=self._stuck[0], reason=reason)
        self._spares.look_after()
        self._record.connections.look(map(self._find, self._tasks), self._ports)
        absence = self._meeting.absent(self._tasks, self._find)
        if absence is not None:
            return Decision("kill", task=absence.task, reason=absence.reason)
        if not self._record.reported and not self._spares.allowed and now >= self._began_at + _NO_NEWS:
            self._spares.allow(preload=self._uses_tensorflow())
        verdict = self._watchdog.check()
        if verdict is not None and verdict.kind == "hung":
            self._stuck = verdict.task, now + _STACKS
            # Others would die of the signal: only who has reported progress has a handler.
            return Decision("signal", signum=signal.SIGUSR2, pids=self._reporting(), line=verdict.line)
        if verdict is not None:
            return Decision("go on", line=verdict.line)
        back_at = self._members.next_return()
        if self._may_ask() and back_at is not None and now >= back_at:
            self._asked = True
            line = "Tasks are asked to save and to end, so that the absent workers can be tried again."
            return Decision("signal", signum=signal.SIGUSR1, pids=self._reporting(), line=line)
        return GO_ON

    def _may_ask(self) -> bool:
        """Whether every worker is known to answer the wish that it save and end."""
        return self._answers_signals and not self._asked and self._all_at_work()

    def _all_at_work(self) -> bool:
        # Outside of fit nobody answers.
        return len(self._latest) == len(self.places) and all(
            p.done and p.train and p.phase != "idle" for p in self._latest.values()
        )

    def _reporting(self) -> list[int]:
        return [
            latest.pid
            for task, latest in self._latest.items()
            if (process := self._find(task)) is None or process.exit_code is None
        ]

    def _uses_tensorflow(self) -> bool:
        found = map(self._find, self._tasks)
        return any(process is not None and process.uses("libtensorflow") for process in found)

    def grace(self, usual: float) -> float:
        """The user's; or enough to save for those who keep checkpoints."""
        return saving_grace(usual, self._grace, saves=self._record.folder is not None)
