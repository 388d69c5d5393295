"""Watches the start of a job: which tasks wait for others, and which ended, were stopped or do not come.

Launched tasks wait for each other without a time limit of their own, because the launcher knows which tasks
are alive. A task that can no longer come counts as failed, and so does one that does not come in time. This
module only decides; `running_tasks` ends the tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from dtrain.base.clock import REAL, Clock, RunClock
from dtrain.base.tcp import split_address
from dtrain.environments.topology import Task
from dtrain.launch.job.policy import GO_ON, Decision
from dtrain.launch.job.task_handle import TaskHandle
from dtrain.launch.supervision.reports import describe_exit
from dtrain.task.task_messages import ConnectedNote, Message, RendezvousNote
from dtrain.telemetry.training_clock import in_words

START_TIMEOUT = 600.0
"""Seconds that tasks wait for one that has not made its strategy, unless the user sets a `start_timeout`."""

_STOPPED = 30.0  # seconds that others wait for a task that is stopped by SIGSTOP
_CHECK_INTERVAL = 1.0  # seconds between two checks


class RendezvousWatch:
    """The rendezvous of one attempt.

    Only the time in which the launcher ran counts (`RunClock`): the tasks may have been stopped with it.

    Args:
        start_timeout: seconds that tasks wait for one that has not made its strategy before it counts as
            failed; None means `START_TIMEOUT`.
        clock: on which they wait.
    """

    def __init__(self, start_timeout: float | None = None, clock: Clock = REAL) -> None:
        self._clock = clock
        self._running = RunClock(clock, _CHECK_INTERVAL)
        self._limit = START_TIMEOUT if start_timeout is None else start_timeout
        self._waiting: dict[Task, float] = {}  # since when each task waits, by `_running`
        self._joined: set[Task] = set()
        self._ended: set[Task] = set()  # the tasks that have ended with status 0
        self._making: dict[Task, float] = {}  # since when each task makes its first strategy, as above
        self._made: set[Task] = set()  # the tasks that have made a strategy
        self._next = 0.0

    def note(self, message: Message) -> None:
        """Receive a task's message; only those about the rendezvous matter."""
        if isinstance(message, ConnectedNote):
            self._waiting.pop(message.task, None)
            self._joined.add(message.task)
            self.trains(message.task)
        elif isinstance(message, RendezvousNote) and message.over:
            self._waiting.pop(message.task, None)
            self._joined.add(message.task)
        elif isinstance(message, RendezvousNote):
            self._joined.discard(message.task)
            now = self._running.now()
            self._waiting.setdefault(message.task, now)
            if message.task not in self._made:
                self._making.setdefault(message.task, now)

    def trains(self, task: Task) -> None:
        """A task has made its strategy, or reports progress, so it waits for no other to make one."""
        self._making.pop(task, None)
        self._made.add(task)

    def started(self, task: Task) -> None:
        """A task was started, perhaps again: it has not joined the rendezvous yet."""
        self._forget(task)
        self._ended.discard(task)
        self._joined.discard(task)
        self._made.discard(task)

    def ended(self, task: Task, code: int) -> None:
        """A task has ended; `code` is its exit code, negative for a death by signal."""
        self._forget(task)
        if code == 0:
            self._ended.add(task)

    def _forget(self, task: Task) -> None:
        self._waiting.pop(task, None)
        self._making.pop(task, None)

    def next_check(self) -> float | None:
        """When to call `check` and `late` next, on the clock; None while no task waits for others."""
        if not self._waiting and not self._making:
            return None
        return self._next

    def check(self, tasks: Iterable[Task], find: Callable[[Task], TaskHandle | None]) -> Decision:
        """Decide to kill the attempt if a missing task has ended, or is stopped."""
        self._next = self._clock.now() + _CHECK_INTERVAL
        self._running.check()
        if not self._waiting:
            return GO_ON
        waited = self._running.now() - min(self._waiting.values())
        for task in self._ended - self._joined:
            reason = f"{describe_exit(0)} before it had met the other tasks, which wait for it"
            return Decision("kill", task=task, reason=reason)
        for task in tasks if waited >= _STOPPED else ():
            process = self._missing(task, find)
            if process is not None and process.stopped():
                reason = f"was stopped (SIGSTOP) while others waited {in_words(waited)} for it"
                return Decision("kill", task=task, reason=reason)
        return GO_ON

    def late(
        self, addresses: Mapping[Task, str], find: Callable[[Task], TaskHandle | None]
    ) -> Decision | None:
        """The task to blame if tasks have waited for longer than the time limit; None if they have not.

        Args:
            addresses: all tasks of the attempt, each with its address.
            find: finds the process of a task.

        Returns:
            The decision to kill the attempt because of that task.
        """
        making = {task: self._making[task] for task in addresses if task in self._making}
        waited = self._running.now() - min(making.values(), default=math.inf)
        if waited < self._limit:
            return None
        for task, address in addresses.items():
            process = self._missing(task, find)
            # A parameter server or its worker comes by listening.
            if process is not None and not process.listens([split_address(address)[1]]):
                return _late(task, f"had not met the other tasks after {in_words(waited)}")
        return _late(
            next(iter(making)), f"had met the other tasks, but not made its strategy after {in_words(waited)}"
        )

    def _missing(self, task: Task, find: Callable[[Task], TaskHandle | None]) -> TaskHandle | None:
        """The process of a task that runs, and has not come to the others; None if there is none."""
        if task in self._joined or task in self._waiting or task in self._ended:
            return None
        process = find(task)
        return None if process is None or process.exit_code is not None else process


def _late(task: Task, what: str) -> Decision:
    return Decision("kill", task=task, reason=f"{what} (--start-timeout), and was killed")
