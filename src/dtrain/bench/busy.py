"""How much of the cores did other programs take while a run was measured? Read from Linux' counters."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: where "cpuN" of /proc/stat has them


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
    wanted = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        ticks = sum(int(line[1 + place]) for line in lines if line and line[0] in wanted for place in _BUSY)
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of this process and all processes below it that have ended."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
