"""Watches the tasks of a job until they have met: who waits, who has ended or stands still meanwhile.

Launched tasks wait for each other without a limit, as the launcher knows who lives. Who does not come any
more is found here; what becomes of it is the policy's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dtrain.channel import ConnectedNote, MeetingNote, Message
from dtrain.launch.reports import describe_exit
from dtrain.launch.task_process import TaskProcess
from dtrain.launch.watchdog import START_LIMIT
from dtrain.slowness import in_words
from dtrain.topology import Task

_SETTLED = 1.0  # seconds after a task's end until all that it has said has surely been heard
_STOPPED = 30.0  # seconds after which others wait no longer for a task that is held by SIGSTOP
_LOOK = 1.0  # seconds between two looks at who is held


@dataclass(frozen=True)
class Absence:
    """A task for which others wait in vain.

    Attributes:
        task: which one.
        reason: what became of it, for the user.
    """

    task: Task
    reason: str


class Meeting:
    """The meeting of one attempt.

    Args:
        hang_timeout: seconds after which a task that does not come hangs, but at least those that a first
            step may take; None for no limit.
        clock: the time in seconds; for tests.
    """

    def __init__(
        self, hang_timeout: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = None if hang_timeout is None else max(hang_timeout, START_LIMIT)
        self._clock = clock
        self._waiting: dict[Task, float] = {}  # since when
        self._met: set[Task] = set()
        self._ended: dict[Task, float] = {}  # with status 0

    def note(self, message: Message) -> None:
        """Hear what a task says."""
        if isinstance(message, ConnectedNote) or (isinstance(message, MeetingNote) and message.over):
            self._waiting.pop(message.task, None)
            self._met.add(message.task)
        elif isinstance(message, MeetingNote):
            self._met.discard(message.task)
            self._waiting.setdefault(message.task, self._clock())

    def started(self, task: Task) -> None:
        """A task was started, perhaps again: it has not met anybody yet."""
        for known in (self._waiting, self._ended):
            known.pop(task, None)
        self._met.discard(task)

    def ended(self, task: Task, code: int) -> None:
        """A task has ended."""
        self._waiting.pop(task, None)
        if code == 0:
            self._ended[task] = self._clock()

    def next_check(self) -> float | None:
        """When `absent` wants to be asked, on the clock; None while nobody waits."""
        if not self._waiting:
            return None
        return self._clock() + _LOOK

    def absent(self, tasks: Iterable[Task], find: Callable[[Task], TaskProcess | None]) -> Absence | None:
        """A task for which others wait in vain, if there is one."""
        if not self._waiting:
            return None
        now = self._clock()
        waited = now - min(self._waiting.values())
        for task, at in self._ended.items():
            if task not in self._met and now - at >= _SETTLED:
                return Absence(
                    task, f"{describe_exit(0)} before it had met the other tasks, which wait for it"
                )
        for task in tasks:
            if task in self._met or task in self._waiting or task in self._ended:
                continue
            process = find(task)
            if process is None or process.exit_code is not None:
                continue
            if waited >= _STOPPED and process.stopped():
                return Absence(task, f"was stopped (SIGSTOP) while others waited {in_words(waited)} for it")
            if self._limit is not None and waited >= self._limit:
                return Absence(task, f"had not met the other tasks after {in_words(waited)}, and was killed")
        return None
