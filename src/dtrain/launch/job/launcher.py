"""The interface of launchers: how the tasks of a job become processes, on this machine or elsewhere.

A launcher decides nothing about the job: the restart engine (`restarts`, `running_tasks`) tells it what to
start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_handle import TaskCommand, TaskHandle
from dtrain.task.task_messages import ImportsNote


@dataclass(frozen=True)
class Assignment:
    """A task's view of the job, with all addresses, and the variables that this task alone gets."""

    topology: Topology
    variables: Mapping[str, str] = field(default_factory=dict)


class Spare(Protocol):
    """A process that has imported the program's libraries, or still does, and may become a task."""

    ready: bool

    @property
    def handle(self) -> TaskHandle:
        """The process."""

    def become(self, command: TaskCommand) -> bool:
        """Continue as this task; returns whether that worked. A spare that failed must be discarded."""

    def discard(self) -> None:
        """End the spare."""


class Launcher(ABC):
    """Starts the tasks of one job. `launchers` finds one by name.

    Args:
        session: receives exits and messages in `events`, shows output on `console`, has a folder for files.
        spec: the job; None for a caller that runs no command of a `JobSpec`.
    """

    restarts_job = False
    """Whether its system restarts the job after a failure; dtrain then makes one attempt only."""

    restarts_task = True
    """Whether it can start one task again while the others run; else `start` always gets all tasks."""

    silent_failures = False
    """Whether a task that loses a peer may end before it can send a message; MPI libraries do that."""

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        self.session = session
        self.spec = spec

    @abstractmethod
    def opened(self) -> AbstractContextManager[None]:
        """The context of all other calls, inside the session's. At its end, nothing of the job is left."""

    @abstractmethod
    def assign(
        self, tasks: Sequence[Task], env: Mapping[str, str]
    ) -> AbstractContextManager[Sequence[Assignment]]:
        """Choose the tasks' machines and addresses; they are reserved while the context is open.

        Each task gets all addresses when it starts, so they are chosen before the first start. If machines
        are missing, it may leave out the last workers, down to `JobSpec.min_workers`.

        Args:
            tasks: those of one job name (worker, ps) in index order.
            env: the environment that all tasks share.
        """

    @abstractmethod
    def start(self, commands: Sequence[TaskCommand]) -> Sequence[TaskHandle]:
        """Start tasks, and show their output as lines marked with the task; if one fails, none is left."""

    def slots(self) -> int | None:
        """The number of workers for which there are machines now; None if nothing limits it.

        When it grows, put 0 into the session's events: then an elastic job is asked whether it grows too.
        """
        return None

    def host(self, task: Task) -> str:
        """The name of the host of a task of the present attempt; "" if all tasks are on this machine."""
        return ""

    def job_ended(self, status: int) -> None:  # noqa: B027 - most launchers have nobody to tell
        """The job has ended with this exit status; called before `opened` ends, if no exception ends it."""

    @abstractmethod
    def kill_rest(self) -> None:
        """Kill the processes that ended tasks have left behind."""

    def start_spare(
        self, command: Sequence[str], env: Mapping[str, str], imports: ImportsNote
    ) -> Spare | None:
        """Start a process that waits to become a task; None if this launcher has no spares."""
        return None
