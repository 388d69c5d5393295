"""Decides whether a job is restarted after a failure, and after what delay.

The rules see only the failures of the attempts, in order. They start no process and show nothing.
"""

from __future__ import annotations

import collections
import signal
from dataclasses import dataclass

from dtrain.base.clock import REAL, Clock
from dtrain.environments.topology import Task
from dtrain.launch.supervision.reports import describe_exit

USAGE = 2
"""The exit status of a command with wrong arguments; a restart cannot help."""

_DEATHS = 3  # deaths by the same signal at the same step after which the job is not restarted
# The same for SIGKILL, which may come from outside soon after each start: equal steps prove less.
_KILLS = 6

_HOUR = 3600.0
_FIRST_DELAY = 1.0  # seconds before a restart
_LONGEST_DELAY = 30.0


class Budget:
    """Limits the restarts of a job to `limit` within any hour, counting those of one task and of all tasks.

    Args:
        limit: the largest number of restarts within an hour; 0 allows none.
        clock: on which the hour passes.
    """

    def __init__(self, limit: int, clock: Clock = REAL) -> None:
        self.limit = limit
        self._clock = clock
        self._taken: collections.deque[float] = collections.deque()

    def take(self) -> float | None:
        """Use one restart of the budget.

        Returns:
            The seconds to wait before the restart: 1, doubled for each earlier restart of the last hour, at
            most 30; None if the budget is used up.
        """
        now = self._clock.now()
        while self._taken and now - self._taken[0] > _HOUR:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return None
        self._taken.append(now)
        return back_off(len(self._taken))

    def __str__(self) -> str:
        return f"{len(self._taken)} of at most {self.limit} restarts in an hour"


def back_off(times: int) -> float:
    """Seconds to wait after `times` failures in a row (at least 1): 1, 2, 4 and so on, at most 30."""
    return float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(times - 1, 10)))


@dataclass(frozen=True)
class Failure:
    """How an attempt failed.

    Attributes:
        task: the task that failed first.
        code: its exit status; negative for a death by signal.
        exception: the type and message of the exception that its program raised, or None.
        step: the training step that it had reached, or None if it completed no step in this attempt.
        progressed: whether any task completed a step in this attempt.
        stepped: whether any task completed a step in any attempt of the job.
        reason: how the task failed, in words, if the exit status does not show it.
        lost_peer: whether the exception says that a peer is gone or cannot be reached. Then the program is
            not the cause, and the same may go well next time.
    """

    task: Task
    code: int
    exception: str | None = None
    step: int | None = None
    progressed: bool = False
    stepped: bool = False
    reason: str = ""
    lost_peer: bool = False

    def __str__(self) -> str:
        where = "before its first step" if self.step is None else f"at step {self.step}"
        return f"{self.task} {self.reason or describe_exit(self.code)} {where}"


@dataclass(frozen=True)
class RestartDecision:
    """Whether the job is restarted, after how many seconds, and the line to show to the user."""

    again: bool
    delay: float
    line: str


class RestartRules:
    """Judges the failures of one job, in order.

    Args:
        budget: limits the restarts of the job.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.before: list[Failure] = []
        self._in_vain = 0

    def decide(self, failure: Failure, everyone: str = "All are") -> RestartDecision:
        """Decide whether the job is restarted after this failure.

        Args:
            failure: how the attempt failed.
            everyone: the subject of the line that announces the restart.
        """
        line = self.hopeless(failure)
        self.before.append(failure)
        if line:
            return RestartDecision(False, 0.0, f"{line}, so the job is not started again.")
        self._in_vain = 0 if failure.progressed else self._in_vain + 1
        if self._budget.take() is None:
            if not self._budget.limit:
                return RestartDecision(False, 0.0, "The job is not started again (--max-restarts 0).")
            line = f"The job is not started again: it has had {self._budget} (--max-restarts)."
            return RestartDecision(False, 0.0, line)
        delay = 0.0 if failure.progressed else back_off(self._in_vain)
        when = f" in {delay:g} s" if delay else ""
        return RestartDecision(True, delay, f"{everyone} started again{when} ({self._budget})")

    def hopeless(self, failure: Failure) -> str:
        """Why another attempt cannot succeed, as the start of a line; "" if it may succeed."""
        if failure.code == USAGE:
            return "It was called with wrong arguments"
        if failure.code == 0:
            return "It would end in the same way again"
        raised = failure.code > 0 and not failure.lost_peer
        if raised and not failure.stepped:
            return "No step was ever completed before this error"
        if raised and self.before and _same(failure, self.before[-1]):
            return f"It is the same error as before, {_where(failure)}"
        deaths = _KILLS if failure.code == -signal.SIGKILL else _DEATHS
        last = self.before[-deaths + 1 :]
        # A task that dies before its first step may have been killed from outside; the budget limits that.
        often = len(last) == deaths - 1 and all(_same(failure, other) for other in last)
        if failure.code < 0 and failure.step is not None and often:
            return f"It has ended in the same way {deaths} times in a row, {_where(failure)}"
        return ""


def _same(one: Failure, other: Failure) -> bool:
    return (one.task, one.code, one.exception, one.step) == (
        other.task,
        other.code,
        other.exception,
        other.step,
    )


def _where(failure: Failure) -> str:
    return "before the first step" if failure.step is None else f"at step {failure.step}"
