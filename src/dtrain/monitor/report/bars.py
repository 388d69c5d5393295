"""Draws stacked bars: the time of an epoch, or of a whole run, by part.

It draws seconds and shares, and does not explain the parts; `dtrain.monitor.report.breakdown` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dtrain.monitor.report import text
from dtrain.monitor.report.markup import drawings, ordered, part_class
from dtrain.monitor.report.scales import Scale

_WIDTH, _HEIGHT = 360.0, 212.0
_TOP, _RIGHT, _BOTTOM = 8.0, 8.0, 34.0
_CHARACTER = 6.6


@dataclass(frozen=True)
class Bar:
    """One bar: the label below it, its name in tooltips, and its seconds by part."""

    label: str
    name: str
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


def grouped(bars: Sequence[Bar], most: int) -> tuple[list[Bar], int]:
    """At most `most` bars, each the mean of consecutive given bars; and the number of bars in each mean."""
    size = -(-len(bars) // most)
    if size <= 1:
        return list(bars), 1
    means = []
    for start in range(0, len(bars), size):
        group = bars[start : start + size]
        names = {name for bar in group for name in bar.parts}
        mean = {name: sum(bar.parts.get(name, 0.0) for bar in group) / len(group) for name in names}
        means.append(Bar(group[0].label, f"{group[0].name} to {group[-1].label}, on average", mean))
    return means, size


@dataclass(frozen=True)
class _Piece:
    """The rectangle of a part, and its tooltip."""

    kind: str
    tooltip: str
    x: float
    width: float
    y: float = 0.0
    height: float = 0.0


def bar_chart(title: str, bars: Sequence[Bar], axis: str) -> Markup:
    """A chart of stacked bars, in seconds."""
    top = max((bar.seconds for bar in bars), default=0.0) or 1.0
    up = Scale(0.0, top * 1.04)
    ticks = [(tick, text.seconds(tick)) for tick in up.ticks(4)]
    left, right = 12 + _CHARACTER * max(len(label) for _, label in ticks), _WIDTH - _RIGHT
    base = _HEIGHT - _BOTTOM
    slot = (right - left) / len(bars)
    width = min(slot * 0.78, 46.0)

    def y(value: float) -> float:
        return base - up.share(value) * (base - _TOP)

    stacks, end = [], -10.0
    for place, bar in enumerate(bars):
        middle = left + slot * (place + 0.5)
        half = len(bar.label) * _CHARACTER / 2
        labelled = middle - half >= end + 6 and middle + half <= _WIDTH
        end = middle + half if labelled else end
        stacks.append((_stack(bar, middle - width / 2, width, y), middle, bar.label if labelled else ""))
    total = {name: sum(bar.parts.get(name, 0.0) for bar in bars) for bar in bars for name in bar.parts}
    shares = ", ".join(f"{name} {text.percent(total[name] / sum(total.values()))}" for name in ordered(total))
    frame = {"width": _WIDTH, "height": _HEIGHT, "left": left, "right": right, "base": base, "axis": axis}
    frame["heights"] = [(y(tick), label) for tick, label in ticks]
    return drawings.bar_chart(title, ordered(total), f"{title}. In all: {shares}", frame, stacks)


def _stack(bar: Bar, x: float, width: float, place: Callable[[float], float]) -> list[_Piece]:
    pieces, below = [], 0.0
    for name in ordered(bar.parts):
        seconds = bar.parts[name]
        bottom, top = place(below), place(below + seconds)
        below += seconds
        if bottom - top < 0.1:
            continue
        # A thin gap separates neighbouring parts for readers who cannot distinguish their colours.
        gap = 0.8 if bottom - top > 2.5 else 0.0
        tooltip = f"{bar.name}: {name} {text.seconds(seconds)} ({text.percent(seconds / bar.seconds)})"
        pieces.append(_Piece(part_class(name), tooltip, x, width, top, bottom - top - gap))
    return pieces


def flat_bar(parts: Mapping[str, float], name: str) -> Markup:
    """A horizontal bar of full width for a row of a table: the shares of the parts in their sum."""
    total = sum(parts.values())
    if total <= 0:
        return Markup()
    pieces, x = [], 0.0
    for part in ordered(parts):
        width = 1000 * parts[part] / total
        tooltip = f"{name}: {part} {text.seconds(parts[part])} ({text.percent(parts[part] / total)})"
        pieces.append(_Piece(part_class(part), tooltip, x, max(width - 2, 0.5)))
        x += width
    return drawings.flat_bar(name, pieces)
