"""How much time this process has spent, by part, since it started: what goodput is computed from.

The training clock measures; this module adds the time before there was a clock.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

from dtrain.telemetry.training_clock import clock

_runs: list[Path] = []  # the first run of this process


def elapsed() -> dict[str, float]:
    """The seconds so far: by part (`events.PARTS`), without zeros; further entries are no parts.

    Returns:
        `before` are the seconds before the training clock began, and `waiting` the part of `communication` in
        which this process waited for other workers.
    """
    seconds = {"before": _start(os.getpid())[0], **clock.seconds(), "waiting": clock.waiting}
    return {part: rounded for part, value in seconds.items() if (rounded := round(value, 3))}


def process_began() -> float:
    """The Unix time at which this process started; it also tells processes apart."""
    return _start(os.getpid())[1]


def run_begins(path: Path) -> dict[str, float] | None:
    """Notes that a run begins in this process.

    Args:
        path: a file of the run.

    Returns:
        What is `elapsed` and not the run's; None if all of it is. A program belongs to its first run, but a
        session that a user types into does not.
    """
    if not _runs and not hasattr(sys, "ps1"):
        _runs.append(path)
    return None if path in _runs else elapsed()


@functools.cache
def _start(process: int) -> tuple[float, float]:
    """The seconds from the start of this process to that of the clock, and the Unix time of the start.

    The clock of a forked process is older than the process, so the seconds may be negative.

    Args:
        process: the process' id, as a forked process has another start.
    """
    measured = sum(clock.seconds().values())
    age = _age()
    return (0.0 if age is None else age - measured), round(time.time() - (age or measured), 3)


def _age() -> float | None:
    """The seconds since this process started; None where the system does not say so."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return age if age > 0 else None
