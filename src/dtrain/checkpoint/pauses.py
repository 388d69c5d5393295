"""Notices that this process was stopped for a while, such as by a signal or with its whole machine.

A later attempt of the job may have replaced a process that was stopped, and may have ended meanwhile.
"""

from __future__ import annotations

import functools
import math
import threading

from dtrain.base.clock import REAL, Clock

LONGEST = 5.0
"""Seconds without a sign of life from which on a process counts as stopped; a launcher waits longer."""

_TICK = 1.0


class PauseWatch:
    """Remembers when this process was last stopped.

    Args:
        clock: the clock, which goes on while the process is stopped.
    """

    def __init__(self, clock: Clock = REAL) -> None:
        self._clock = clock
        self._last = clock.now()
        self._noticed = -math.inf

    def tick(self) -> float:
        """Notes that the process runs; returns the time now."""
        now = self._clock.now()
        if now - self._last > LONGEST:
            self._noticed = now
        self._last = now
        return now

    def was_paused(self, since: float) -> bool:
        """Whether the process has been stopped since a time that `tick` has returned."""
        self.tick()
        return self._noticed > since

    def run(self) -> None:
        """Ticks for ever."""
        while True:
            self._clock.sleep(_TICK)
            self.tick()


@functools.cache
def pause_watch() -> PauseWatch:
    """The watch of this process, which begins with the first call."""
    watch = PauseWatch()
    threading.Thread(target=watch.run, name="dtrain-pauses", daemon=True).start()
    return watch
