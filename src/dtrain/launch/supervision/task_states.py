"""What each task of a job does now, for whoever shows it while the job runs. It decides nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtrain.base.clock import REAL, Clock
from dtrain.environments.topology import Task
from dtrain.task.task_messages import Progress

_DOES: Mapping[str, str] = {
    "input": "waits for data",
    "step": "trains",
    "callbacks": "in callbacks",
    "evaluate": "evaluates",
    "checkpoint": "saves a checkpoint",
    "idle": "between trainings",
}


@dataclass(frozen=True)
class TaskState:
    """What a task did when it was last heard of.

    Attributes:
        task: the task.
        state: its state in words.
        at: when that was, on the clock of `TaskStates`.
        step: the training step that it had reached; None if it has not said so.
        step_seconds: the seconds of a step; None if it has not said so.
        failed: whether it has failed.
    """

    task: Task
    state: str
    at: float
    step: int | None = None
    step_seconds: float | None = None
    failed: bool = False


class TaskStates:
    """The states of the tasks of the present attempt. One thread notes them, any other may read them."""

    def __init__(self, clock: Clock = REAL) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._states: dict[Task, TaskState] = {}

    def now(self) -> list[TaskState]:
        """The states, in the order in which the tasks were started."""
        with self._lock:
            return list(self._states.values())

    def attempt_begins(self) -> None:
        """Forgets the tasks of the attempt before."""
        with self._lock:
            self._states.clear()

    def started(self, task: Task) -> None:
        """A task was started, perhaps again."""
        self._note(TaskState(task, "starts", self.clock.now()))

    def progressed(self, progress: Progress) -> None:
        """A task has reported its progress."""
        state = _DOES.get(progress.phase, progress.phase)
        state = "evaluates" if state == "trains" and not progress.train else state
        known = (progress.step, progress.seconds_per_step)
        self._note(TaskState(progress.task, state, self.clock.now(), *known))

    def ended(self, task: Task, code: int) -> None:
        """A task has ended with this exit status, or -N by signal N."""
        with self._lock:
            before = self._states.get(task, TaskState(task, "", 0.0))
        words = "has ended" if code == 0 else f"has ended with status {code}"
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            words = f"was ended by {known.get(-code, f'signal {-code}')}"
        self._note(replace(before, state=words, at=self.clock.now(), failed=code != 0))

    def _note(self, state: TaskState) -> None:
        with self._lock:
            self._states[state.task] = state
