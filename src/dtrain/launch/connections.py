"""Finds out whether the tasks of a job ever connected to each other, and says what to write if not.

Without a strategy that connects them, each task trains a model of its own, and all seems well. It only looks
and speaks: no job fails of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from dtrain.cluster.sockets import listens
from dtrain.launch.processes import Outcome
from dtrain.launch.task_process import TaskProcess

_EVERY = 1.0  # seconds; importing TensorFlow alone takes longer


class Connections:
    """What is known of one job, over all attempts.

    Args:
        tasks: how many processes it has at most; one alone has nobody to connect to.

    Attributes:
        made: whether a task said that it is connected, or served on its address.
        tensorflow: whether a task has loaded TensorFlow.
    """

    def __init__(self, tasks: int) -> None:
        self.made = tasks < 2
        self.tensorflow = False
        self._next = 0.0

    def next_look(self) -> float | None:
        """When `look` is due, by `time.monotonic()`; None for never again."""
        return None if self.made else self._next

    def look(self, processes: Iterable[TaskProcess | None], ports: Collection[int]) -> None:
        """Once a second: what processes have loaded, and whether one serves, which TensorFlow's do untold."""
        if self.made or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        running = [process for process in processes if process is not None]
        self.tensorflow = self.tensorflow or any(process.uses("libtensorflow") for process in running)
        if self.tensorflow:
            self.made |= any(listens(process.pid, ports) for process in running)

    def advice(self, outcome: Outcome) -> str:
        """What to tell the user at the end of a job; "" where there is nothing to say."""
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
