"""Finds out whether the tasks of a job ever connected to each other, and warns the user if they did not.

Without a strategy that connects them, each task trains a model of its own, and no error shows it. This module
only warns; it never makes a job fail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dtrain.base.clock import REAL, Clock
from dtrain.launch.job.task_handle import TaskHandle
from dtrain.launch.supervision.running_tasks import JobOutcome

_EVERY = 1.0  # seconds; importing TensorFlow alone takes longer


class Connections:
    """Whether the tasks of one job have connected, over all attempts.

    Args:
        tasks: the largest number of processes in the job; a single process needs no connection.
        clock: on which the checks are due.

    Attributes:
        made: whether a task reported that it is connected, or was seen to listen on its port.
        tensorflow: whether a task was seen to have loaded TensorFlow.
    """

    def __init__(self, tasks: int, clock: Clock = REAL) -> None:
        self._clock = clock
        self.made = tasks < 2
        self.tensorflow = False
        self._next = 0.0

    def next_check(self) -> float | None:
        """When to call `check` next, on the clock; None once a connection is known."""
        return None if self.made else self._next

    def check(self, processes: Iterable[TaskHandle | None], ports: Collection[int]) -> None:
        """Inspect the processes, at most once a second: the libraries they loaded, the ports they listen on.

        A TensorFlow server sends the launcher no message, so only its listening port shows it.
        """
        if self.made or self._clock.now() < self._next:
            return
        self._next = self._clock.now() + _EVERY
        running = [process for process in processes if process is not None]
        self.tensorflow = self.tensorflow or any(process.uses("libtensorflow") for process in running)
        if self.tensorflow:
            self.made |= any(process.listens(ports) for process in running)

    def advice(self, outcome: JobOutcome) -> str:
        """The warning to show at the end of a job.

        It is "" if the tasks connected, never loaded TensorFlow, or the job failed or was interrupted.
        """
        tasks = outcome.exit_codes
        over = outcome.first_failure is not None or outcome.signal is not None
        if self.made or not self.tensorflow or over:
            return ""
        name = "parameter_server" if any(task.job == "ps" for task in tasks) else "multi_worker"
        return (
            f"Warning: the {len(tasks)} processes of this job never connected to each other. If the program "
            "trains a model, each process trained one of its own. Hint: to train one model together, write "
            f'`strategy = dtrain.strategy("{name}")`, and build and compile the model inside '
            "`with strategy.scope():`."
        )
