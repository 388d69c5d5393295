"""How much of the cores did other programs take while a run was measured?"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil


class Others:
    """Counts from when it is made.

    Args:
        cores: the numbers of those that count.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(cores), _own_seconds()

    def share(self) -> float | None:
        """Of the cores' time, what was not our ended children's; None where the system does not tell."""
        busy = _busy_seconds(self._cores)
        seconds = (time.monotonic() - self._began) * len(self._cores)
        if busy is None or self._busy is None or seconds <= 0:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return round(min(max(others / seconds, 0.0), 1.0), 3)


def _busy_seconds(cores: Sequence[int]) -> float | None:
    """Since the machine was started; the sum over these cores."""
    try:
        found = [psutil.cpu_times(percpu=True)[core] for core in cores]
    except (OSError, IndexError):
        return None
    return sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in found)


def _own_seconds() -> float:
    """Of this process and all processes below it that have ended."""
    return sum(os.times()[:4])
