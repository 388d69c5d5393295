"""Which workers does an elastic job run with, now that some do not come up, and when are they tried again?

A place is one of the most workers that the job may have; a task's index counts the places that are present.
It only keeps the list: no process is started here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

_PATIENCE = 2  # failures before the first step, one after another, after which a place is given up


class Members:
    """The places of a job, 0 to `most` - 1.

    Args:
        fewest: with how many the job still runs; `most` where it is not elastic.
        most: how many there are.
        rejoin: seconds until a place that was given up is tried again; twice as many each time in vain.
        clock: the time in seconds; for tests.
    """

    def __init__(
        self, fewest: int, most: int, *, rejoin: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fewest = fewest
        self.most = most
        self._rejoin = rejoin
        self._clock = clock
        self._in_vain = dict.fromkeys(range(most), 0)
        self._delay: dict[int, float] = {}  # of every place that was ever given up, until it works again
        self._back_at: dict[int, float] = {}  # of the absent ones

    @property
    def elastic(self) -> bool:
        """Whether the job may run with fewer."""
        return self.fewest < self.most

    def present(self) -> list[int]:
        """The places with a worker, in the order of the workers' indices."""
        return [place for place in range(self.most) if place not in self._back_at]

    def works(self, places: Iterable[int]) -> None:
        """Note that the workers of these places have completed a step."""
        for place in places:
            self._in_vain[place] = 0
            self._delay.pop(place, None)

    def failed_to_start(self, place: int) -> bool:
        """Note that a worker has ended before its first step; whether its place is to be given up.

        One that was given up before has one try, others have two.
        """
        self._in_vain[place] += 1
        return place in self._delay or self._in_vain[place] >= _PATIENCE

    def can_lose_one(self) -> bool:
        """Whether enough are left without one more."""
        return len(self.present()) > self.fewest

    def give_up(self, place: int) -> float:
        """Go on without this place; the seconds until it is tried again."""
        delay = self._delay.get(place, self._rejoin / 2) * 2
        self._delay[place] = delay
        self._back_at[place] = self._clock() + delay
        self._in_vain[place] = 0
        return delay

    def next_return(self) -> float | None:
        """When the next absent one may be tried again; None where none is absent."""
        return min(self._back_at.values(), default=None)

    def take_in(self) -> list[int]:
        """Make those present whose time has come; which they are."""
        now = self._clock()
        due = [place for place, at in self._back_at.items() if now >= at]
        for place in due:
            del self._back_at[place]
        return sorted(due)
