"""The clock that rules about time read: the machine's by default, a given one where tests decide the time.

Whatever waits, gives up or restarts after some seconds takes a `Clock` as an argument. It measures nothing:
`training_clock` does that.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass

__all__ = ["REAL", "Clock", "Deadline", "RunClock"]


class Clock:
    """The machine's monotonic clock. A subclass may decide the time itself."""

    def now(self) -> float:
        """The time in seconds, from an arbitrary origin; it never decreases."""
        return time.monotonic()

    def unix(self) -> float:
        """The Unix time in seconds, which other processes share; it jumps when the system's clock is set."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Returns after this many seconds."""
        threading.Event().wait(seconds)  # `time.sleep` fails under libfaketime

    def deadline(self, seconds: float | None) -> Deadline:
        """The time that is this many seconds from now; None sets no limit."""
        return Deadline(self, math.inf if seconds is None else self.now() + seconds)


@dataclass(frozen=True)
class Deadline:
    """A time on a clock until which something may last.

    Attributes:
        clock: the clock on which it is.
        at: the time in seconds; infinite if nothing limits it.
    """

    clock: Clock
    at: float

    def left(self) -> float:
        """The seconds until then, at least 0."""
        return max(0.0, self.at - self.clock.now())

    def passed(self) -> bool:
        """Whether that time has come."""
        return self.clock.now() >= self.at


class RunClock(Clock):
    """The time for which this process has run, for limits on the silence of others.

    Who was stopped has heard nothing meanwhile, and must not take that for the silence of others. So at most
    `gap` seconds count between two checks, because a process that runs checks as often.

    Args:
        clock: the clock that shows how much time has passed.
        gap: the most seconds that count between two calls of `check`.
    """

    def __init__(self, clock: Clock, gap: float = 1.0) -> None:
        self._clock = clock
        self._gap = gap
        self._checked = clock.now()
        self._counted = 0.0  # the seconds up to the last check

    def now(self) -> float:
        """The seconds for which this process has run since the clock was made."""
        return self._counted + min(self._gap, self.since_check())

    def sleep(self, seconds: float) -> None:
        """Returns after this many seconds, of the clock that was given."""
        self._clock.sleep(seconds)

    def since_check(self) -> float:
        """All seconds since the last check."""
        return self._clock.now() - self._checked

    def check(self) -> None:
        """Notes that this process runs now."""
        self._counted, self._checked = self.now(), self._clock.now()


REAL = Clock()
"""The machine's clock, the default of every argument `clock`."""
