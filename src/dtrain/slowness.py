"""The rule that decides whether a worker is slow, and the line that reports it. It measures nothing."""

from __future__ import annotations

SLOW = 3.0
"""A worker is slow if its own time per step is more than this many times the others'."""

_LEAST_DIFFERENCE = 0.002  # seconds per step; smaller differences are not reported
_LEAST_PART = 0.15  # a slow worker's own time is more than this fraction of the step


def is_slow(mine: float, usual: float, step: float) -> bool:
    """Whether a worker is so slow that the others wait for it.

    Args:
        mine: the worker's own seconds per step, without waiting for other workers.
        usual: the median of the other workers' own seconds per step.
        step: the seconds of a whole step.
    """
    return mine > SLOW * usual and mine - usual > _LEAST_DIFFERENCE and mine > _LEAST_PART * step


def slow_line(who: str, mine: float, usual: float, *, reading: float, between: float) -> str:
    """The line that reports a slow worker and what it spends most of its own time on.

    Args:
        who: the worker's name.
        mine, usual: as for `is_slow`.
        reading: the part of `mine` that the worker waits for its next batch.
        between: the part of `mine` that it spends in callbacks.
    """
    parts = {
        "waiting for its next batch": reading,
        "in callbacks": between,
        "computing": max(0.0, mine - reading - between),
    }
    what, seconds = max(parts.items(), key=lambda item: item[1])
    times = "" if usual <= 0 else f", {mine / usual:.1f} times as long"
    return (
        f"{who} is slow, and the others wait for it: its own part of a step takes {in_words(mine)}, "
        f"that of the others {in_words(usual)}{times}; {in_words(seconds)} of it is {what}"
    )


def in_words(seconds: float) -> str:
    """A duration in seconds as text, with two significant digits below 10 s and whole seconds above."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{round(seconds, 1):g} s" if seconds >= 1 else f"{seconds:.2g} s"
