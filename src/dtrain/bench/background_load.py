"""Measures how much of the cores other programs used during a run. It does not tell which programs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil


class BackgroundLoad:
    """Measures the use of cores by other programs, from the moment that this object is made.

    Args:
        cores: the numbers of the cores to measure.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(cores), _own_seconds()

    def share(self) -> float | None:
        """The share of the cores' time, from 0 to 1, used by others than this process and its children.

        Children count when they have ended. None if the system does not report the use of cores.
        """
        busy = _busy_seconds(self._cores)
        seconds = (time.monotonic() - self._began) * len(self._cores)
        if busy is None or self._busy is None or seconds <= 0:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return round(min(max(others / seconds, 0.0), 1.0), 3)


def _busy_seconds(cores: Sequence[int]) -> float | None:
    """Busy seconds since the machine was started, summed over `cores`; None if unknown."""
    try:
        times = [psutil.cpu_times(percpu=True)[core] for core in cores]
    except (OSError, IndexError):
        return None
    return sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in times)


def _own_seconds() -> float:
    """CPU seconds of this process and of its descendants that have ended."""
    return sum(os.times()[:4])
