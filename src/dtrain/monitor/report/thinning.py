"""Thins long curves: keeps the lowest and the highest point of each stretch, and the two ends.

A spike of a single step therefore stays visible. It does not smooth or average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def thin_curve(
    x: Sequence[float], y: Sequence[float], most: int
) -> tuple[Sequence[float], Sequence[float], bool]:
    """Thin a curve to at most `most` points.

    Args:
        x: positions, ascending.
        y: values, NaN for a gap.
        most: the largest number of points, at least 4.

    Returns:
        The positions, the values, and whether any points were left out.
    """
    total = len(x)
    if total <= most:
        return x, y, False
    stretches = (most - 2) // 2
    kept = {0, total - 1}
    for stretch in range(stretches):
        start, stop = stretch * total // stretches, (stretch + 1) * total // stretches
        kept.update(_extremes(y, start, stop))
    places = sorted(kept)
    return [x[place] for place in places], [y[place] for place in places], True


def _extremes(y: Sequence[float], start: int, stop: int) -> tuple[int, int]:
    """The indices of the lowest and the highest value of a stretch; its start if it has no value."""
    part = y[start:stop]
    total = sum(part)
    if total != total:  # a NaN is among the values, with which `min` and `max` give wrong results
        places = [place for place in range(start, stop) if y[place] == y[place]]
        if not places:
            return start, start
        return min(places, key=y.__getitem__), max(places, key=y.__getitem__)
    low, high = min(part), max(part)
    return y.index(low, start, stop), y.index(high, start, stop)


def thin_list(items: Sequence[_T], most: int) -> tuple[list[_T], int]:
    """At most `most` items, the first and the last ones, in order; and the number of items left out."""
    if len(items) <= most:
        return list(items), 0
    head = most - most // 2
    return [*items[:head], *items[len(items) - most // 2 :]], len(items) - most
