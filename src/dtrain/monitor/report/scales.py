"""Axes: the range of numbers that an axis shows, linear or logarithmic, and its ticks.

It computes only; it draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LOG_FROM = 100.0
_SMALLEST, _LARGEST = 1e-290, 1e300


@dataclass(frozen=True)
class Scale:
    """One axis: the values at its ends, and whether it is logarithmic."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """The position of a value on the axis, from 0 to 1."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)  # their quotient could be infinite
            return (math.log(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """Round values on the axis, about `most` of them; with `whole`, only whole numbers."""
        if self.log:
            return self._log_ticks(most)
        step = _nice((self.high - self.low) / max(most, 1))
        if whole:
            step = max(1.0, math.ceil(step))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        apart = max(1, math.ceil((last - first) / most))
        ticks = [10.0**power for power in range(first, last + 1, apart)]
        inside = [tick for tick in ticks if self.low <= tick <= self.high]
        return inside if len(inside) >= 2 else [self.low, self.high]


def value_scale(values: Iterable[float], *, from_zero: bool = False) -> Scale:
    """The axis of a curve's values.

    Args:
        values: all values; NaN is ignored.
        from_zero: whether the axis begins at 0, as for rates and shares; ignored if a value is negative.

    Returns:
        A linear axis with some room at its ends. If all values are positive and the largest is more than 100
        times the median, a logarithmic axis (not with `from_zero`), so that a spike does not flatten the
        rest.
    """
    known = sorted(_bounded(value) for value in values if value == value)
    if not known:
        return Scale(0.0, 1.0)
    low, high = known[0], known[-1]
    if low > 0 and not from_zero and high / known[len(known) // 2] > _LOG_FROM:
        return Scale(low / 1.2, high * 1.2, log=True)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.06 if high > 0 else 1.0)
    flat = high - low <= 1e-9 * max(abs(low), abs(high))
    room = (abs(low) * 0.1 or 1.0) if flat else (high - low) * 0.06
    return Scale(0.0 if 0 <= low < room else low - room, high + room)


def _bounded(value: float) -> float:
    """A value with which an axis can be computed: near the limits of floats, ranges overflow or vanish."""
    return 0.0 if abs(value) < _SMALLEST else math.copysign(min(abs(value), _LARGEST), value)


def position_scale(low: float, high: float) -> Scale:
    """The horizontal axis of a chart; a single position gets a range of 1 around it."""
    room = max(0.5, abs(low) * 1e-9)  # adding less could change nothing
    return Scale(low, high) if high - low > abs(low) * 1e-12 else Scale(low - room, low + room)


def _nice(step: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(max(step, _SMALLEST)))
    return next(factor * power for factor in (1, 2, 5, 10) if step <= factor * power * (1 + 1e-9))
