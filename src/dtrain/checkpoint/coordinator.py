"""Decides at which step all workers save, and whether they end there.

Workers exchange proposals at steps that all know beforehand, and all make the same decision from the same
proposals. Between these steps no worker sends or awaits a message. Writing checkpoints is not done here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtrain.base.clock import REAL, Clock
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.plain_values import sendable
from dtrain.process_group.value_exchange import exchange

_INTERVAL = 0.5  # seconds between two exchanges of proposals


@sendable
@dataclass(frozen=True)
class SaveProposal:
    """What one worker sends to the others.

    Attributes:
        busy: whether the worker's last checkpoint is still being written.
        notice: the reason of its preemption notice; "" if there is none.
        due: whether `seconds` have passed since the last save; only the first worker's value is used.
        step_seconds: its mean step time since the last exchange; only the first worker's value is used.
    """

    busy: bool
    notice: str
    due: bool
    step_seconds: float


@dataclass(frozen=True)
class SaveDecision:
    """What all workers do now.

    Attributes:
        save: whether to write a checkpoint.
        notice: the reason to end after saving; "" to continue training.
        late: whether a checkpoint is due while the previous one is still being written.
    """

    save: bool = False
    notice: str = ""
    late: bool = False


class SaveCoordinator:
    """Exchanges proposals about twice a second, and each time that `every` steps are done.

    Args:
        layout: the strategy's layout.
        every: steps between two checkpoints; None if steps do not count.
        seconds: seconds between two checkpoints; None if time does not count.
        total: how many steps are done.
        exchange: sends this worker's value to all workers, and returns the values of all.
        clock: tells the time.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        *,
        every: int | None,
        seconds: float | None,
        total: int,
        exchange: Callable[[ReplicaLayout, Any], list[Any]] = exchange,
        clock: Clock = REAL,
    ) -> None:
        self._exchange = exchange
        self._now = clock.now
        self._layout = layout
        self._every = every
        self._seconds = seconds
        self._next = total
        self._saved_period = self._seen_period = self._period(total)
        self._saved_at = self._met_at = self._now()
        self._met_total = total

    def decide(self, total: int, *, busy: bool, notice: str) -> SaveDecision:
        """Decides whether to save now; every worker calls it between steps. Most calls return at once.

        Args:
            total: how many steps are done.
            busy: whether this worker's last checkpoint is still being written.
            notice: the reason of this worker's preemption notice, or "".
        """
        period = self._period(total)
        if total < self._next and period == self._seen_period:
            return SaveDecision()
        self._seen_period = period
        now = self._now()
        made = total - self._met_total
        # Before the first step, the step time is unknown; with this value, the next exchange follows it.
        taken = max(1e-4, (now - self._met_at) / made) if made > 0 else _INTERVAL
        timely = self._seconds is not None and now - self._saved_at >= self._seconds
        proposals = self._exchange(self._layout, SaveProposal(busy, notice, timely, taken))
        self._met_at, self._met_total = now, total
        # A single worker need not wait for others, so it decides at every step.
        steps = 1 if self._layout.workers == 1 else max(1, int(_INTERVAL / proposals[0].step_seconds))
        self._next = total + steps
        noted = next((proposal.notice for proposal in proposals if proposal.notice), "")
        if noted:
            return SaveDecision(save=True, notice=noted)
        due = proposals[0].due or period != self._saved_period
        busy = any(proposal.busy for proposal in proposals)
        return SaveDecision(save=due and not busy, late=due and busy)

    def max_steps(self, total: int) -> int | None:
        """The number of steps from `total` to the next multiple of `every`; None if steps do not count."""
        return self._every - total % self._every if self._every else None

    def saved(self, total: int) -> None:
        """Records that a save of this step was started."""
        self._saved_at = self._now()
        self._saved_period = self._period(total)

    def _period(self, total: int) -> int:
        """How many times `every` steps are complete; 0 if steps do not count."""
        return total // self._every if self._every else 0
