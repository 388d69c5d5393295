"""Tracks which workers an elastic job runs with, and when an absent worker is tried again.

A place is a worker's fixed number, from 0 to the largest number of workers minus 1. A worker's task index
counts only the places that are present, so it changes between attempts. This module starts no process.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.base.clock import REAL, Clock

_PATIENCE = 2  # consecutive failures before the first step, after which a place is given up


class Membership:
    """The places of a job, 0 to `most` - 1.

    Args:
        fewest: the smallest number of workers that the job may run with; `most` if the job is not elastic.
        most: the number of places.
        rejoin: seconds until a given-up place is tried again; doubled each time it fails to start again.
        clock: on which these seconds pass.
    """

    def __init__(self, fewest: int, most: int, *, rejoin: float, clock: Clock = REAL) -> None:
        self.fewest = fewest
        self.most = most
        self._rejoin = rejoin
        self._clock = clock
        self._in_vain = dict.fromkeys(range(most), 0)
        self._delay: dict[int, float] = {}  # seconds, for each given-up place until it completes a step
        self._back_at: dict[int, float] = {}  # when each absent place is tried again

    @property
    def elastic(self) -> bool:
        """Whether the job may run with fewer than all its workers."""
        return self.fewest < self.most

    def present(self) -> list[int]:
        """The places with a worker, in the order of the workers' indices."""
        return [place for place in range(self.most) if place not in self._back_at]

    def works(self, places: Iterable[int]) -> None:
        """Record that the workers of these places have completed a step; this clears their failures."""
        for place in places:
            self._in_vain[place] = 0
            self._delay.pop(place, None)

    def failed_to_start(self, place: int) -> bool:
        """Record that a worker ended before its first step.

        Returns:
            Whether to give the place up: after the first such failure of a place that was given up before,
            otherwise after the second.
        """
        self._in_vain[place] += 1
        return place in self._delay or self._in_vain[place] >= _PATIENCE

    def can_lose_one(self) -> bool:
        """Whether the job still has enough workers if one more place is given up."""
        return len(self.present()) > self.fewest

    def give_up(self, place: int) -> float:
        """Mark a place as absent; returns the seconds until it is tried again."""
        delay = self._delay.get(place, self._rejoin / 2) * 2
        self._delay[place] = delay
        self._back_at[place] = self._clock.now() + delay
        self._in_vain[place] = 0
        return delay

    def next_return(self) -> float | None:
        """When the next absent place is due for another try, on the clock; None if none is absent."""
        return min(self._back_at.values(), default=None)

    def readmit(self) -> list[int]:
        """Mark the absent places whose time has come as present; returns these places, sorted."""
        now = self._clock.now()
        due = [place for place, at in self._back_at.items() if now >= at]
        for place in due:
            del self._back_at[place]
        return sorted(due)
