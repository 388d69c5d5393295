"""How often may a job be started again? At most so many times within any hour.

It counts; whether a failure is worth another try is the policies' to say.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

_HOUR = 3600.0
_FIRST_DELAY = 1.0  # seconds before a restart
_LONGEST_DELAY = 30.0


class Budget:
    """The restarts that a job may have: at most `limit` within any hour, of tasks and of the whole job alike.

    Args:
        limit: 0 allows none.
        clock: the time in seconds; for tests.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._taken: collections.deque[float] = collections.deque()

    def take(self) -> float | None:
        """Take one.

        Returns:
            Seconds to wait before the restart: 1, and twice as long for each that the last hour has seen, up
            to 30; None where the budget is used up.
        """
        now = self._clock()
        while self._taken and now - self._taken[0] > _HOUR:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return None
        self._taken.append(now)
        return back_off(len(self._taken))

    def __str__(self) -> str:
        return f"{len(self._taken)} of at most {self.limit} restarts in an hour"


def back_off(times: int) -> float:
    """Seconds to wait before the next of so many tries in vain: 1, 2, 4 and so on, at most 30."""
    return float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(times - 1, 10)))
