"""What the rounds of a job with a quorum have used, and what they lacked.

The server counts; nothing is decided here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.clock import REAL, Clock


@dataclass
class QuorumReport:
    """Counts over all rounds so far in which weights were averaged.

    Attributes:
        workers: the number of workers of the job.
        quorum: the fewest contributions of a round.
        rounds: how many rounds have ended.
        contributions: how many contributions they have used.
        missed: how many they lacked, because a worker was away: lost, or not a member again.
        late: how many they lacked because they had come too late, or could not be used.
        examples: of the contributions that were used.
        missed_examples, late_examples: of those that were lacking, if each had as many as the others'.
        away_seconds: for which workers were away, summed over the workers.
        first_away_seconds: the same of the first worker alone.
    """

    workers: int
    quorum: int
    clock: Clock = field(default=REAL, repr=False)
    rounds: int = 0
    contributions: int = 0
    missed: int = 0
    late: int = 0
    examples: int = 0
    missed_examples: int = 0
    late_examples: int = 0
    away_seconds: float = 0.0
    first_away_seconds: float = 0.0
    _since: dict[int, float] = field(default_factory=dict, repr=False)

    def count(self, rows: Iterable[int], late: int) -> None:
        """A round has ended.

        Args:
            rows: the examples of each contribution that was used.
            late: how many members were behind, or sent what cannot be used.
        """
        used = [*rows]
        missed = self.workers - len(used) - late
        usual = sum(used) / max(1, len(used))
        self.rounds += 1
        self.contributions += len(used)
        self.missed += missed
        self.late += late
        self.examples += sum(used)
        self.missed_examples += round(missed * usual)
        self.late_examples += round(late * usual)

    def leaves(self, worker: int) -> None:
        """A worker is no member any more."""
        self._since.setdefault(worker, self.clock.now())

    def is_back(self, worker: int) -> None:
        """A worker is a member."""
        since = self._since.pop(worker, None)
        if since is not None:
            self._add(worker, self.clock.now() - since)

    def settle(self) -> None:
        """Counts the time up to now of the workers that are away."""
        now = self.clock.now()
        for worker, since in self._since.items():
            self._add(worker, now - since)
            self._since[worker] = now

    def _add(self, worker: int, seconds: float) -> None:
        self.away_seconds += seconds
        if worker == 0:
            self.first_away_seconds += seconds

    @property
    def share(self) -> float:
        """The examples that were used, as a share of those of rounds without a loss."""
        whole = self.examples + self.missed_examples + self.late_examples
        return self.examples / whole if whole else 1.0

    def as_record(self) -> dict[str, Any]:
        """The counts as values that JSON can hold."""
        counts = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name not in ("clock", "_since")
        }
        return {
            **counts,
            "away_seconds": round(self.away_seconds, 3),
            "first_away_seconds": round(self.first_away_seconds, 3),
            "share": round(self.share, 4),
        }

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds had {self.contributions} of {self.rounds * self.workers} contributions "
            f"({self.examples} examples, {self.share:.1%} of those of all workers); {self.missed} lacked "
            f"because a worker was away (for {self.away_seconds:.0f} s in all), and {self.late} were late"
        )
