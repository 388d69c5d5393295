"""A wait for other tasks: when it gives up, and when it logs again for whom it waits.

It does not find out who is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dtrain.base.clock import REAL, Clock

LOG_INTERVAL = 10.0
"""Seconds between two log lines that name the missing tasks."""


class LoggedWait:
    """A time limit from now on, and log lines until then.

    Args:
        seconds: the time limit.
        log: gets the lines.
        clock: the clock of both.
        every: seconds between two lines.

    Attributes:
        seconds, clock: as given.
        deadline: when the time is over.
    """

    def __init__(
        self, seconds: float, log: Callable[[str], None], clock: Clock = REAL, every: float = LOG_INTERVAL
    ) -> None:
        self.seconds = seconds
        self.clock = clock
        self.deadline = clock.deadline(seconds)
        self._log = log
        self._every = every
        self._next_line = clock.deadline(every)

    def log_if_due(self, missing: Sequence[str]) -> bool:
        """Logs the missing tasks if the last line, or the beginning, is long enough ago; returns whether."""
        if not missing or not self._next_line.passed():
            return False
        self._next_line = self.clock.deadline(self._every)
        self._log(f"waiting for {', '.join(missing)}{remaining_wait(self.deadline.left())}")
        return True

    def pause(self) -> float:
        """The seconds until the next line is due or the time is over."""
        return min(self._next_line.left(), self.deadline.left())


def remaining_wait(seconds: float) -> str:
    """The remaining waiting time as the end of a log line; "" if there is no limit."""
    return f"; giving up in {max(0.0, seconds):.0f} s" if seconds < math.inf else ""
