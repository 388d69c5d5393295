"""Decides at which step all workers save, and whether they stop there.

All decide alike, from the same proposals. The steps at which they exchange these are known beforehand:
between two of them nothing is sent, and nobody waits for a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtrain.keras_engine import messages
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange

_INTERVAL = 0.5  # seconds between two exchanges of proposals


@messages.sendable
@dataclass(frozen=True)
class SaveProposal:
    """What one worker tells the others.

    Attributes:
        busy: its last checkpoint is not yet written.
        notice: why its machine will be taken away; "" if it will not.
        due: whether it is time for a checkpoint; the first worker's clock counts.
        step_seconds: its last steps' usual time; the first worker's counts.
    """

    busy: bool
    notice: str
    due: bool
    step_seconds: float


@dataclass(frozen=True)
class SaveDecision:
    """What all workers do now.

    Attributes:
        save: write a checkpoint.
        notice: save and end, for this reason; "" to go on.
        late: a checkpoint is due, and the one before is still being written.
    """

    save: bool = False
    notice: str = ""
    late: bool = False


class SaveCoordinator:
    """Exchanges proposals about twice a second, and where a number of steps is complete.

    Args:
        layout: the strategy's.
        every: steps between two checkpoints, or None where steps do not count.
        seconds: seconds between two checkpoints, or None.
        total: steps that are done.
        exchange: gives every worker's value to all of them.
        clock: gives seconds.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        *,
        every: int | None,
        seconds: float | None,
        total: int,
        exchange: Callable[[ReplicaLayout, Any], list[Any]] = exchange,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._layout = layout
        self._every = every
        self._seconds = seconds
        self._next = total
        self._saved_period = self._seen_period = self._period(total)
        self._saved_at = self._met_at = self._clock()
        self._met_total = total

    def decide(self, total: int, *, busy: bool, notice: str) -> SaveDecision:
        """Called between any two steps, by every worker; most calls return at once.

        Args:
            total: steps done by now.
            busy: whether this worker's last checkpoint is still being written.
            notice: why this worker's machine will be taken away, or "".
        """
        period = self._period(total)
        if total < self._next and period == self._seen_period:
            return SaveDecision()
        self._seen_period = period
        now = self._clock()
        made = total - self._met_total
        # Before the first step its time is unknown: then they meet again after it.
        taken = max(1e-4, (now - self._met_at) / made) if made > 0 else _INTERVAL
        timely = self._seconds is not None and now - self._saved_at >= self._seconds
        proposals = self._exchange(self._layout, SaveProposal(busy, notice, timely, taken))
        self._met_at, self._met_total = now, total
        # A single worker waits for nobody, so it may decide at every step.
        steps = 1 if self._layout.workers == 1 else max(1, int(_INTERVAL / proposals[0].step_seconds))
        self._next = total + steps
        noted = next((each.notice for each in proposals if each.notice), "")
        if noted:
            return SaveDecision(save=True, notice=noted)
        due = proposals[0].due or period != self._saved_period
        busy = any(each.busy for each in proposals)
        return SaveDecision(save=due and not busy, late=due and busy)

    def max_steps(self, total: int) -> int | None:
        """Steps from `total` to the next save by number of steps; None where steps do not count."""
        return self._every - total % self._every if self._every else None

    def saved(self, total: int) -> None:
        """Notes that a checkpoint of this step was begun."""
        self._saved_at = self._clock()
        self._saved_period = self._period(total)

    def _period(self, total: int) -> int:
        """How many times the number of steps between two checkpoints is complete."""
        return total // self._every if self._every else 0
