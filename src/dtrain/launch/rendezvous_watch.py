"""Watches the rendezvous of a job: which tasks wait there, and which ended or were stopped before joining.

Launched tasks wait for each other without a time limit, because the launcher knows which tasks are alive. A
task that can no longer come counts as failed. This module only decides; `processes` ends the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dtrain.clock import REAL, Clock
from dtrain.launch.policy import GO_ON, Decision
from dtrain.launch.reports import describe_exit
from dtrain.launch.task_handle import TaskHandle
from dtrain.launch.watchdog import START_LIMIT
from dtrain.task_messages import ConnectedNote, Message, RendezvousNote
from dtrain.topology import Task
from dtrain.training_clock import in_words

_STOPPED = 30.0  # seconds that others wait for a task that is stopped by SIGSTOP
_CHECK_INTERVAL = 1.0  # seconds between two checks for stopped tasks


class RendezvousWatch:
    """The rendezvous of one attempt.

    Args:
        hang_timeout: seconds that the others wait for a missing task before it counts as failed, at least
            `START_LIMIT`; None sets no limit.
        clock: on which they wait.
    """

    def __init__(self, hang_timeout: float | None = None, clock: Clock = REAL) -> None:
        self._clock = clock
        self._limit = None if hang_timeout is None else max(hang_timeout, START_LIMIT)
        self._waiting: dict[Task, float] = {}  # since when each task waits
        self._joined: set[Task] = set()
        self._ended: set[Task] = set()  # the tasks that have ended with status 0
        self._next = 0.0

    def note(self, message: Message) -> None:
        """Receive a task's message; only those about the rendezvous matter."""
        if isinstance(message, ConnectedNote) or (isinstance(message, RendezvousNote) and message.over):
            self._waiting.pop(message.task, None)
            self._joined.add(message.task)
        elif isinstance(message, RendezvousNote):
            self._joined.discard(message.task)
            self._waiting.setdefault(message.task, self._clock.now())

    def started(self, task: Task) -> None:
        """A task was started, perhaps again: it has not joined the rendezvous yet."""
        self._waiting.pop(task, None)
        self._ended.discard(task)
        self._joined.discard(task)

    def ended(self, task: Task, code: int) -> None:
        """A task has ended; `code` is its exit code, negative for a death by signal."""
        self._waiting.pop(task, None)
        if code == 0:
            self._ended.add(task)

    def next_check(self) -> float | None:
        """When to call `check` next, on the clock; None while no task waits at the rendezvous."""
        if not self._waiting:
            return None
        return self._next

    def check(self, tasks: Iterable[Task], find: Callable[[Task], TaskHandle | None]) -> Decision:
        """Decide to kill the attempt if a missing task has ended, is stopped, or exceeds the time limit."""
        if not self._waiting:
            return GO_ON
        now = self._clock.now()
        self._next = now + _CHECK_INTERVAL
        waited = now - min(self._waiting.values())
        for task in self._ended - self._joined:
            reason = f"{describe_exit(0)} before it had met the other tasks, which wait for it"
            return Decision("kill", task=task, reason=reason)
        for task in tasks:
            if task in self._joined or task in self._waiting or task in self._ended:
                continue
            process = find(task)
            if process is None or process.exit_code is not None:
                continue
            if waited >= _STOPPED and process.stopped():
                reason = f"was stopped (SIGSTOP) while others waited {in_words(waited)} for it"
                return Decision("kill", task=task, reason=reason)
            if self._limit is not None and waited >= self._limit:
                reason = f"had not met the other tasks after {in_words(waited)}, and was killed"
                return Decision("kill", task=task, reason=reason)
        return GO_ON
