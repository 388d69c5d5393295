"""At which step all workers save, and whether they stop there: all decide alike, from the same votes.

Steps at which they meet are known beforehand: nothing is sent in between, and nobody waits for a message.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dtrain.keras_engine import messages
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange

_INTERVAL = 0.5  # seconds between two meetings


@messages.sendable
@dataclass(frozen=True)
class Vote:
    """What one worker brings to a meeting.

    Attributes:
        busy: its last checkpoint is not yet written.
        notice: that its machine will be taken away, in words; "" for none.
        due: whether it is time for a checkpoint; the first worker's clock counts.
        step_seconds: its last steps' usual time; the first worker's counts.
    """

    busy: bool
    notice: str
    due: bool
    step_seconds: float


@dataclass(frozen=True)
class Decision:
    """What all do now.

    Attributes:
        save: write a checkpoint.
        notice: save and end, for this reason; "" to go on.
        late: a checkpoint is due, and the one before is still being written.
    """

    save: bool = False
    notice: str = ""
    late: bool = False


class Council:
    """Meets about twice a second, and where a number of steps is up.

    Args:
        layout: the strategy's.
        every: steps between two checkpoints, or None where steps do not count.
        seconds: seconds between two checkpoints, or None.
        total: steps that are done.
    """

    def __init__(
        self, layout: ReplicaLayout, *, every: int | None, seconds: float | None, total: int
    ) -> None:
        self._layout = layout
        self._every = every
        self._seconds = seconds
        self._next = total
        self._saved_round = total // every if every else 0
        self._seen_round = self._saved_round
        self._saved_at = time.monotonic()
        self._met_at = time.monotonic()
        self._met_total = total

    def meet(self, total: int, *, busy: bool, notice: str) -> Decision:
        """Called between any two steps, by every worker; most calls return at once.

        Args:
            total: steps done by now.
            busy: whether this worker's last checkpoint is still being written.
            notice: that this worker's machine will be taken away, or "".
        """
        current = total // self._every if self._every else 0
        if total < self._next and current == self._seen_round:
            return Decision()
        self._seen_round = current
        now = time.monotonic()
        made = total - self._met_total
        # Before the first step nothing is known: then they meet after it.
        taken = max(1e-4, (now - self._met_at) / made) if made > 0 else _INTERVAL
        timely = self._seconds is not None and now - self._saved_at >= self._seconds
        votes = exchange(self._layout, Vote(busy, notice, timely, taken))
        self._met_at, self._met_total = now, total
        # Alone there is nobody to wait for, so every step may be a meeting.
        steps = 1 if self._layout.workers == 1 else max(1, int(_INTERVAL / votes[0].step_seconds))
        self._next = total + steps
        noted = next((vote.notice for vote in votes if vote.notice), "")
        if noted:
            return Decision(save=True, notice=noted)
        due = votes[0].due or current != self._saved_round
        busy = any(vote.busy for vote in votes)
        return Decision(save=due and not busy, late=due and busy)

    def room(self, total: int) -> int | None:
        """Steps from `total` to the next at which a number of them is up; None where they do not count."""
        return self._every - total % self._every if self._every else None

    def saved(self, total: int) -> None:
        """Says that a checkpoint of this step was begun."""
        self._saved_at = time.monotonic()
        self._saved_round = total // self._every if self._every else 0
