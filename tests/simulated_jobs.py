"""Jobs without processes: the real restart engine and policies, driven by simulated tasks on a given clock.

A task's program is a generator that yields the seconds until it goes on. Time passes only while the engine
waits for an event, so a job of many minutes takes milliseconds, at the shipped time limits. Real processes,
signals and output are not simulated: a smoke test of each fault runs them.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import io
import itertools
import math
import queue
import signal
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.environments.topology import Task
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Assignment, Launcher
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_environment import local_topologies
from dtrain.launch.job.task_handle import Event, TaskCommand, TaskHandle
from dtrain.launch.supervision.parameter_servers import ParameterServerJob
from dtrain.launch.supervision.reports import exit_status
from dtrain.launch.supervision.running_tasks import JobOutcome
from dtrain.launch.supervision.synchronous import SynchronousJob
from dtrain.task.task_messages import (
    CheckpointNote,
    ConnectedNote,
    FailureNote,
    ImportsNote,
    Message,
    Progress,
    RendezvousNote,
)
from given_clock import GivenClock

FOR_EVER = math.inf
"""What a program yields that never goes on by itself."""

BEAT = 1.0
"""Seconds between two reports of a task that runs."""

_LONGEST = 24 * 3600.0  # seconds that a simulated job may take

_MANY = 1000

Steps = Generator[float, None, "int | None"]
Program = Callable[["SimulatedTask"], Steps]


class World:
    """The given clock, what happens when, and the session's queue of events, whose readers let time pass."""

    def __init__(self) -> None:
        self.clock = GivenClock(0.0)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._in_vain = 0  # calls of `get` in a row that neither waited nor returned an event
        self._events: collections.deque[Event] = collections.deque()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Has something happen so many seconds from now."""
        if seconds < FOR_EVER:
            heapq.heappush(self._agenda, (self.clock.now() + seconds, next(self._number), action))

    def put(self, item: Event) -> None:
        """Adds an event."""
        self._events.append(item)

    def get_nowait(self) -> Event:
        """The next event that is there; no time passes."""
        self._happen(self.clock.now())
        if not self._events:
            raise queue.Empty
        return self._events.popleft()

    def get(self, *, timeout: float | None = None) -> Event:
        """The next event. Time passes until it comes, or until the timeout."""
        until = FOR_EVER if timeout is None else self.clock.now() + timeout
        self._happen(self.clock.now())
        while not self._events:
            at = min(self._agenda[0][0] if self._agenda else FOR_EVER, until)
            assert at < FOR_EVER, "the job waits for an event that never comes"
            assert at < _LONGEST, "the job never ends"
            self.clock.at = at
            self._happen(at)
            if at == until and not self._events:
                self._in_vain = self._in_vain + 1 if timeout == 0 else 0
                assert self._in_vain < _MANY, "the engine is busy while no time passes"
                raise queue.Empty
        return self._events.popleft()

    def _happen(self, until: float) -> None:
        """Does all that is due by a time, so that events of one moment are there together."""
        while self._agenda and self._agenda[0][0] <= until:
            heapq.heappop(self._agenda)[2]()


@dataclass
class Started:
    """One start of a task, as the log of a job has it.

    Attributes:
        at: when it started, in seconds since the job began.
        task: the task.
        attempt: the attempt, from 0.
        place: the worker's place; -1 for a task that has none.
        address: its address; "" for a spare.
        name: the job's name, as the environment has it.
        warm: whether it was a spare before.
        signals: the signals that it has received, each with the time.
        ended_at: when it ended; None while it runs.
        code: its exit code.
    """

    at: float
    task: Task
    attempt: int
    place: int
    address: str = ""
    name: str = ""
    warm: bool = False
    signals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float | None = None
    code: int | None = None


class SimulatedTask(TaskHandle):
    """A task whose program is a generator.

    Attributes:
        env: the environment that it was started with.
        attempt, place, workers: as its environment has them.
        on_signal: what it does at a signal, by number: a function of the task, or None to ignore it. Without
            an entry a signal ends it, except SIGUSR2, which dumps stacks.
        heard_after: the seconds after its end until the launcher hears of it.
        serves: whether it listens on its port.
    """

    def __init__(self, job: SimulatedJob, pid: int) -> None:
        super().__init__()
        self.job = job
        self.pid = pid
        self.on_signal: dict[int, Callable[[SimulatedTask], None] | None] = {}
        self.heard_after = 0.0
        self.serves = False
        self._stopped = False
        self._owed: list[Callable[[], None]] = []  # what is due when it is no longer stopped
        self._untaken: list[int] = []  # the signals that it has not taken, because it is stopped
        self._report: Progress | None = None
        self._steps: Steps | None = None

    def run(self, command: TaskCommand, *, warm: bool = False) -> None:
        """Begins as this task."""
        self.task, self.env = command.task, dict(command.env)
        self.attempt, self.place = (
            int(self.env.get("DTRAIN_ATTEMPT", 0)),
            int(self.env.get("DTRAIN_PLACE", -1)),
        )
        topology, name = self.job.topologies[command.task], self.env.get("DTRAIN_JOB", "")
        self.workers = len(topology.jobs.get("worker", ()))
        self.log = Started(self.job.now, command.task, self.attempt, self.place, topology.address, name, warm)
        self.job.log.append(self.log)
        self.job.handles.append(self)
        self._steps = self.job.program(self)
        self.job.world.after(0.0, self._go_on)
        self.job.world.after(BEAT, self._beat)

    @property
    def index(self) -> int:
        """The task's index."""
        assert self.task is not None
        return self.task.index

    def step(
        self,
        number: int,
        phase: str = "step",
        *,
        done: int | None = None,
        seconds: float | None = None,
        own: float | None = None,
        train: bool = True,
    ) -> None:
        """Reports a completed step."""
        assert self.task is not None
        count = number if done is None else done
        self._report = Progress(self.task, self.pid, number, phase, count, train, seconds, own)
        self.send(self._report)

    def trains(self, seconds: float, *, first: int = 1, each: float = 1.0) -> Steps:
        """Makes steps of `each` seconds for some seconds, beginning with the step numbered `first`."""
        for number in range(math.ceil(seconds / each)):
            self.step(first + number, done=number + 1, seconds=each)
            yield min(each, seconds - number * each)
        return None

    def checkpoint(self, step: int, folder: str = "/folder") -> None:
        """Reports a committed checkpoint."""
        assert self.task is not None
        self.send(CheckpointNote(self.task, step, folder))

    def waits_for_peers(self, *, over: bool = False) -> None:
        """Reports that it waits at the rendezvous, or that all have come."""
        assert self.task is not None
        self.send(RendezvousNote(self.task, over))
        if over:
            self.send(ConnectedNote(self.task))

    def raises(self, exception: str, *, lost_peer: bool = False, hint: str = "") -> int:
        """Reports an uncaught exception; returns the status with which the program then ends."""
        assert self.task is not None
        self.send(FailureNote(self.task, exception, lost_peer, hint))
        self.tail.append(exception)
        return 1

    def imports(self, **variables: str) -> None:
        """Reports what it has imported, so that spares can import it."""
        assert self.task is not None
        self.send(ImportsNote(self.task, variables, {}, ("tensorflow",)))

    def send(self, message: Message) -> None:
        """Sends the launcher a message; what has ended sends none."""
        if self.log.code is None:
            self.job.world.put(message)

    def end(self, code: int) -> None:
        """Ends with an exit code, negative for a death by signal."""
        if self.log.code is not None:
            return
        self.log.ended_at, self.log.code = self.job.now, code
        self.ended_at = self.job.world.clock.now()
        self.job.world.after(self.heard_after, lambda: self._announce(code))

    def stop(self) -> None:
        """Is stopped, as by SIGSTOP."""
        self._stopped = True

    def go_on(self) -> None:
        """Is continued, as by SIGCONT."""
        self._stopped = False
        owed, self._owed = self._owed, []
        self._untaken.clear()
        for action in owed:
            action()

    def signal(self, signum: int) -> None:
        """Receives a signal."""
        if self.log.code is not None:
            return
        self.log.signals.append((self.job.now, signum))
        if signum == signal.SIGKILL:
            self.end(-signum)
        elif self._stopped:
            self._untaken.append(signum)
            self._owed.append(lambda: self._receive(signum))
        else:
            self._receive(signum)

    def signal_member(self, pid: int, signum: int) -> bool:
        """Receives a signal that is sent to one process."""
        if pid == self.pid:
            self.signal(signum)
        return pid == self.pid

    def has_taken(self, pid: int, signum: int) -> bool:
        """Whether it runs, and has taken each such signal."""
        return self.log.code is None and signum not in self._untaken

    def stopped(self, pid: int | None = None) -> bool:
        """Whether it is stopped."""
        return self._stopped and pid in (None, self.pid)

    def listens(self, ports: Collection[int]) -> bool:
        """Whether it listens on its port; the tests give it no other."""
        return self.serves

    def join_output(self, patience: float = 2.0) -> None:
        """Its output is complete."""

    def _announce(self, code: int) -> None:
        self.exit_code = code
        self.job.world.put(self)

    def _receive(self, signum: int) -> None:
        handler = self.on_signal.get(signum, _ends if signum != signal.SIGUSR2 else None)
        if handler is _ends:
            self.end(-signum)
        elif handler is not None:
            handler(self)

    def _go_on(self) -> None:
        if self._stopped:
            self._owed.append(self._go_on)
        if self._stopped or self._steps is None or self.log.code is not None:
            return
        try:
            seconds = next(self._steps)
        except StopIteration as ended:
            self.end(ended.value or 0)
        else:
            self.job.world.after(seconds, self._go_on)

    def _beat(self) -> None:
        if self.log.code is not None:
            return
        if self._report is not None and not self._stopped:
            self.send(self._report)
        self.job.world.after(BEAT, self._beat)


def _ends(task: SimulatedTask) -> None:
    """What a signal does to a task that has no handler."""


def saves(task: SimulatedTask, after: float) -> None:
    """A handler of SIGTERM: saves a checkpoint for some seconds, then asks to be run again."""
    task.job.world.after(after, lambda: task.end(75))


class SimulatedSpare:
    """A spare that imports for two seconds and then waits."""

    IMPORTS = 2.0

    def __init__(self, job: SimulatedJob, number: int) -> None:
        self.ready = False
        self._job = job
        self.handle = SimulatedTask(job, 5000 + number)
        self.handle.log = Started(job.now, Task("spare", number), -1, -1)
        job.spares.append(self.handle.log)
        job.world.after(self.IMPORTS, self._is_ready)
        if job.spares_live is not None:
            job.world.after(job.spares_live, lambda: self.handle.end(-11))

    def become(self, command: TaskCommand) -> bool:
        """Begins as this task."""
        if self.handle.log.code is not None:
            return False
        self._job.spares.remove(self.handle.log)
        self.handle.run(command, warm=True)
        return True

    def discard(self) -> None:
        """Is ended."""
        self.handle.signal(signal.SIGKILL)

    def _is_ready(self) -> None:
        if self.handle.log.code is None:
            self.ready = True
            self._job.world.put(0)


class _SimulatedLauncher(Launcher):
    """Starts simulated tasks."""

    def __init__(self, job: SimulatedJob, session: Session, spec: JobSpec) -> None:
        super().__init__(session, spec)
        self._job = job
        self._pids, self._spares = itertools.count(100), itertools.count()
        self._ports = itertools.count(4000)
        self._running: list[SimulatedTask] = []
        self.restarts_task = job.restarts_task
        self.silent_failures = job.silent_failures

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def assign(self, tasks: Sequence[Task], env: Mapping[str, str]) -> Iterator[Sequence[Assignment]]:
        room = self._job.room
        tasks = tasks if room is None else tasks[:room]
        made = local_topologies(tasks, [next(self._ports) for _ in tasks])
        self._job.topologies = {topology.task: topology for topology in made}
        yield [Assignment(topology) for topology in made]

    def start(self, commands: Sequence[TaskCommand]) -> list[SimulatedTask]:
        if self._job.refused_starts > 0:
            self._job.refused_starts -= 1
            raise OSError("Resource temporarily unavailable")
        tasks = [SimulatedTask(self._job, next(self._pids)) for _ in commands]
        for task, command in zip(tasks, commands, strict=True):
            task.run(command)
        self._running += tasks
        return tasks

    def slots(self) -> int | None:
        return self._job.room

    def kill_rest(self) -> None:
        for task in self._running:
            task.signal(signal.SIGKILL)
        self._running.clear()

    def start_spare(
        self, command: Sequence[str], env: Mapping[str, str], imports: ImportsNote
    ) -> SimulatedSpare | None:
        return SimulatedSpare(self._job, next(self._spares)) if self._job.has_spares else None


class SimulatedJob:
    """A job whose tasks run a program, by the real engine.

    Args:
        program: what each task does; it is called once for each start.
        room: the number of workers for which there are machines; None if nothing limits it. It may be changed
            while the job runs, and `grows` says so.
        restarts_task, silent_failures: as for `Launcher`.
        options: those of `JobSpec`.

    Attributes:
        world: the clock, and what happens when.
        log: every start of a task, in order.
        handles: the tasks of these starts.
        spares: the spares that wait.
        refused_starts: how often the system still refuses to start tasks.
        spares_live: the seconds after which each spare dies; None for never.
    """

    def __init__(
        self,
        program: Program,
        *,
        room: int | None = None,
        restarts_task: bool = True,
        silent_failures: bool = False,
        has_spares: bool = False,
        **options: Any,
    ) -> None:
        self.world = World()
        self.program = program
        self.room = room
        self.restarts_task, self.silent_failures, self.has_spares = restarts_task, silent_failures, has_spares
        self.refused_starts = 0
        self.spares_live: float | None = None
        self.topologies: dict[Task, Any] = {}
        self.log: list[Started] = []
        self.handles: list[SimulatedTask] = []
        self.spares: list[Started] = []
        self.errors = io.StringIO()
        spec = JobSpec(command=[sys.executable, "train.py"], **{"workers": 2, "spares": None, **options})
        session = Session(stdout=io.StringIO(), stderr=self.errors, clock=self.world.clock)
        session.events = self.world  # type: ignore[assignment]
        self._launcher = _SimulatedLauncher(self, session, spec)
        kind = ParameterServerJob if spec.ps else SynchronousJob
        self._job = kind(spec, self._launcher)

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return self.world.clock.now()

    def run(self) -> JobOutcome:
        """Runs the job to its end."""
        with self._launcher.opened(), self._job.opened():
            outcome = self._job.run()
        self._job.finish(outcome)
        self.outcome, self.status = outcome, exit_status(outcome)
        assert all(started.code is not None for started in self.log), "a task is left"
        return outcome

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Sequence[TaskCommand], Launcher]]:
        """The commands of the job's first attempt and its launcher, for callers without a restart engine."""
        with self._launcher.opened(), self._job.opened(), self._job.attempt(0) as (_, commands):
            yield commands, self._launcher

    def receives(self, signum: int, at: float) -> None:
        """Sends the launcher a signal at a time."""
        self.world.after(at - self.now, lambda: self.world.put(signum))

    def grows(self, room: int, at: float) -> None:
        """Has machines for so many workers from a time on."""

        def grow() -> None:
            self.room = room
            self.world.put(0)

        self.world.after(at - self.now, grow)

    @property
    def err(self) -> str:
        """What the launcher has written."""
        lines = self.errors.getvalue().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[dtrain] Started: "))

    def states(self) -> dict[str, tuple[str, int | None]]:
        """What the launcher knows of each task of the present attempt: its state and its step."""
        return {str(each.task): (each.state, each.step) for each in self._job.record.states.now()}

    def attempts(self) -> list[list[int]]:
        """The places of the workers of each attempt."""
        by_attempt: dict[int, list[int]] = {}
        for started in self.log:
            by_attempt.setdefault(started.attempt, []).append(started.place)
        return [sorted(by_attempt[number]) for number in sorted(by_attempt)]

    def starts(self, job: str, index: int) -> list[Started]:
        """The starts of one task."""
        return [started for started in self.log if started.task == Task(job, index)]
