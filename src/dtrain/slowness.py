"""When is a worker slow, by its own part of a step and that of the others? The rule alone, and its words."""

from __future__ import annotations

SLOW = 3.0
"""How many times as long as the others' a slow worker's own part of a step is."""

_LEAST_DIFFERENCE = 0.002  # seconds a step that are worth a line
_LEAST_PART = 0.15  # of the step, likewise


def is_slow(mine: float, usual: float, step: float) -> bool:
    """Whether a worker holds up the others.

    Args:
        mine: its own part of a step, in seconds: without waiting for others.
        usual: that of the others, their median.
        step: the whole of a step.
    """
    return mine > SLOW * usual and mine - usual > _LEAST_DIFFERENCE and mine > _LEAST_PART * step


def slow_line(who: str, mine: float, usual: float, *, reading: float, between: float) -> str:
    """A line about a slow worker.

    Args:
        who: its name.
        mine, usual: as for `is_slow`.
        reading, between: of its own part, until its batch was there, and in callbacks.
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
    """A time of seconds or less, with two figures."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{round(seconds, 1):g} s" if seconds >= 1 else f"{seconds:.2g} s"
