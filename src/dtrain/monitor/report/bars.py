"""Bars of parts: where the time of an epoch, or of a whole run, went.

It draws shares of seconds; what they mean is for `dtrain.monitor.report.breakdown` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtrain.monitor.report import text
from dtrain.monitor.report.scales import Scale

PARTS = ("compute", "input", "communication", "checkpoint", "callbacks", "validation", "start", "other")
"""The parts of an epoch's time, in the order in which they are drawn."""

_WIDTH, _HEIGHT = 360.0, 212.0
_TOP, _RIGHT, _BOTTOM = 8.0, 8.0, 34.0
_CHARACTER = 6.3


@dataclass(frozen=True)
class Bar:
    """One bar: what stands below it, what it is called when pointed at, and seconds by part."""

    label: str
    name: str
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def part_class(name: str) -> str:
    """The style of a part; one that is not known looks like `other`."""
    return f"p-{name}" if name in PARTS else "p-other"


def ordered(parts: Mapping[str, float]) -> list[str]:
    """The names of parts, in the order of PARTS, unknown ones last."""
    return [name for name in PARTS if name in parts] + sorted(name for name in parts if name not in PARTS)


def grouped(bars: Sequence[Bar], most: int) -> tuple[list[Bar], int]:
    """At most so many bars: each the mean of as many of the given as is needed. And how many that is."""
    size = -(-len(bars) // most)
    if size <= 1:
        return list(bars), 1
    found = []
    for start in range(0, len(bars), size):
        group = bars[start : start + size]
        names = {name for bar in group for name in bar.parts}
        mean = {name: sum(bar.parts.get(name, 0.0) for bar in group) / len(group) for name in names}
        found.append(Bar(group[0].label, f"{group[0].name} to {group[-1].label}, in the mean", mean))
    return found, size


def bar_chart(title: str, bars: Sequence[Bar], axis: str) -> str:
    """Bars beside each other, each of its parts upon each other, in seconds."""
    top = max((bar.seconds for bar in bars), default=0.0) or 1.0
    up = Scale(0.0, top * 1.04)
    ticks = [(tick, text.seconds(tick)) for tick in up.ticks(4)]
    left = 12 + _CHARACTER * max(len(label) for _, label in ticks)
    slot = (_WIDTH - _RIGHT - left) / len(bars)
    width = min(slot * 0.78, 46.0)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - up.share(value) * (_HEIGHT - _BOTTOM - _TOP)

    parts = []
    for value, label in ticks:
        at = y(value)
        parts.append(
            f'<line class="grid" x1="{left:g}" x2="{_WIDTH - _RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{left - 6:g}" y="{at + 3.6:.1f}" text-anchor="end">{label}</text>'
        )
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="base" x1="{left:g}" x2="{_WIDTH - _RIGHT:g}" y1="{base:g}" y2="{base:g}"/>')
    end = -10.0
    for place, bar in enumerate(bars):
        middle = left + slot * (place + 0.5)
        parts.append(_stack(bar, middle - width / 2, width, y))
        half = len(bar.label) * _CHARACTER / 2
        if middle - half >= end + 6 and middle + half <= _WIDTH:
            end = middle + half
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{_HEIGHT - 19:g}" text-anchor="middle">'
                f"{text.escape(bar.label)}</text>"
            )
    parts.append(
        f'<text class="axis" x="{(left + _WIDTH - _RIGHT) / 2:g}" y="{_HEIGHT - 4:g}" text-anchor="middle">'
        f"{text.escape(axis)}</text>"
    )
    total = {name: sum(bar.parts.get(name, 0.0) for bar in bars) for bar in bars for name in bar.parts}
    said = ", ".join(f"{name} {text.percent(total[name] / sum(total.values()))}" for name in ordered(total))
    return (
        f'<figure class="chart bars"><figcaption><h3>{text.escape(title)}</h3>'
        f"{part_legend(ordered(total))}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="{text.escape(f"{title}. In all: {said}")}">{"".join(parts)}</svg></div></figure>'
    )


def _stack(bar: Bar, x: float, width: float, place: Callable[[float], float]) -> str:
    pieces, below = [], 0.0
    for name in ordered(bar.parts):
        seconds = bar.parts[name]
        bottom, top = place(below), place(below + seconds)
        below += seconds
        if bottom - top < 0.1:
            continue
        # A thin gap keeps neighbours apart for those who cannot tell their colours.
        gap = 0.8 if bottom - top > 2.5 else 0.0
        said = f"{bar.name}: {name} {text.seconds(seconds)} ({text.percent(seconds / bar.seconds)})"
        pieces.append(
            f'<rect class="{part_class(name)}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{bottom - top - gap:.1f}"><title>{text.escape(said)}</title></rect>'
        )
    return f'<g class="stack">{"".join(pieces)}</g>'


def flat_bar(parts: Mapping[str, float], name: str) -> str:
    """A bar that lies in a row of a table: the shares of its parts, whatever their sum."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    pieces, x = [], 0.0
    for part in ordered(parts):
        width = 1000 * parts[part] / total
        said = f"{name}: {part} {text.seconds(parts[part])} ({text.percent(parts[part] / total)})"
        pieces.append(
            f'<rect class="{part_class(part)}" x="{x:.1f}" y="0" height="10" '
            f'width="{max(width - 2, 0.5):.1f}">'
            f"<title>{text.escape(said)}</title></rect>"
        )
        x += width
    return (
        f'<svg class="flat" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{text.escape(f"shares of the time of {name}")}">{"".join(pieces)}</svg>'
    )


def part_name(name: str) -> str:
    """A part's colour and name."""
    return (
        f'<span class="key"><svg class="swatch box" viewBox="0 0 12 12" aria-hidden="true">'
        f'<rect class="{part_class(name)}" width="12" height="12" rx="2"/></svg>{text.escape(name)}</span>'
    )


def part_legend(names: Sequence[str]) -> str:
    """Names and colours of parts."""
    return f'<ul class="legend">{"".join(f"<li>{part_name(name)}</li>" for name in names)}</ul>'
