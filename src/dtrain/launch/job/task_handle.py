"""What a launcher is asked to start, and what it returns: a command, and the handle of the running task.

The restart engine signals, observes and waits for tasks through handles only, wherever the tasks run.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dtrain.environments.topology import Task
from dtrain.task.task_messages import Message

TAIL_LINES = 20
"""The number of a task's last lines that are kept for the report of its failure."""


@dataclass(frozen=True)
class TaskCommand:
    """What one task runs: its argument vector and its whole environment."""

    task: Task
    command: Sequence[str]
    env: Mapping[str, str]


class TaskHandle(ABC):
    """A task that was started, or a spare that may become one.

    When the task has ended and all its messages are in the session's queue of events, the launcher sets
    `ended_at` and `exit_code` and puts the handle into that queue. The methods that are not abstract answer
    for a launcher that cannot tell.

    Attributes:
        task: the task; None for a spare.
        pid: the task's process id on its machine; 0 if the launcher does not know it.
        exit_code: the exit code, negative for a death by signal; None while the task runs.
        ended_at: when it ended, on the session's clock; 0 while it runs.
        tail: its last lines, standard output and standard error together.
    """

    def __init__(self) -> None:
        self.task: Task | None = None
        self.pid = 0
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to the task and to the processes of its group; nothing if it has ended."""

    @abstractmethod
    def join_output(self, patience: float = 2.0) -> None:
        """Wait until the output that the task has written is shown, about `patience` seconds at most."""

    def signal_member(self, pid: int, signum: int) -> bool:
        """Send a signal to one process of the task, and to no other; returns whether it was sent."""
        return False

    def has_taken(self, pid: int, signum: int) -> bool:
        """Whether no signal `signum` waits for the process `pid` of the task, as for one that is stopped."""
        return False

    def stopped(self, pid: int | None = None) -> bool:
        """Whether the process `pid` of the task, by default its first, is stopped by SIGSTOP."""
        return False

    def uses(self, library: str) -> bool:
        """Whether the task has loaded a library whose path contains `library`."""
        return False

    def listens(self, ports: Collection[int]) -> bool:
        """Whether the task listens on one of these ports."""
        return False


Event = TaskHandle | Message | int
"""An event of a job: an ended task, a task's message, the number of a received signal, or 0.

0 means nothing; it only wakes the thread that waits for events.
"""
