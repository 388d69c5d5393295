"""Axes: which stretch of numbers one shows, linear or logarithmic, and at which of them it has ticks.

Pure arithmetic; nothing is drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LOG_FROM = 100.0


@dataclass(frozen=True)
class Scale:
    """One axis: the values at its ends, and whether the way between them is logarithmic."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value is, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """Round values on the axis, about `most` of them; whole ones only if told so."""
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
        found = [10.0**power for power in range(first, last + 1, apart)]
        inside = [tick for tick in found if self.low <= tick <= self.high]
        return inside if len(inside) >= 2 else [self.low, self.high]


def value_scale(values: Iterable[float], *, from_zero: bool = False) -> Scale:
    """The axis of a curve's values.

    Args:
        values: all of them, NaN left out of account.
        from_zero: whether the axis is to begin at 0, as for rates and shares.

    Returns:
        A linear axis with a little room, or, for positive values of which the largest is far from the usual
        one, a logarithmic one, so that a spike does not flatten all the rest.
    """
    known = sorted(value for value in values if value == value)
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


def position_scale(low: float, high: float) -> Scale:
    """The axis along which curves run."""
    return Scale(low, high) if high > low else Scale(low - 0.5, high + 0.5)


def _nice(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if step <= factor * power * (1 + 1e-9))
