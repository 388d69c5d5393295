"""Fewer points for the same picture: of each stretch of a long curve its lowest and its highest point.

So a spike of a single step stays in the picture at any length. It does not smooth or average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def thin_curve(
    x: Sequence[float], y: Sequence[float], most: int
) -> tuple[Sequence[float], Sequence[float], bool]:
    """A curve of at most about `most` points.

    Args:
        x: positions, rising.
        y: values, NaN for a gap.
        most: how many points there may be, at least 4.

    Returns:
        The positions, the values, and whether any were left out.
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
    """Where the lowest and the highest value of a stretch are; its beginning where it has none."""
    part = y[start:stop]
    total = sum(part)
    if total != total:  # a NaN is among them, which min and max would stumble over
        places = [place for place in range(start, stop) if y[place] == y[place]]
        if not places:
            return start, start
        return min(places, key=y.__getitem__), max(places, key=y.__getitem__)
    low, high = min(part), max(part)
    return y.index(low, start, stop), y.index(high, start, stop)


def thin_list(items: Sequence[_T], most: int) -> tuple[list[_T], int]:
    """The first and the last of many items, in order, and how many between them were left out."""
    if len(items) <= most:
        return list(items), 0
    head = most - most // 2
    return [*items[:head], *items[len(items) - most // 2 :]], len(items) - most
