"""Draws one chart of curves: a scalable SVG, a legend, and the data for the script that shows values.

It does not choose the curves; `dtrain.monitor.report.curves` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from markupsafe import Markup

from dtrain.monitor.report import text
from dtrain.monitor.report.markup import drawings
from dtrain.monitor.report.scales import Scale, position_scale, value_scale
from dtrain.monitor.report.thinning import thin_curve, thin_list

WIDTH, HEIGHT = 360.0, 212.0
WIDE = 980.0  # the width of a chart that is alone in its card
_TOP, _RIGHT, _BOTTOM = 12.0, 12.0, 34.0
_CHARACTER = 6.6  # the width of a digit in the ticks' labels
_MARKED = 24  # a curve of at most so many points has a mark on each of them
_MARKS = 40
COLOURS = 8
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4")
_SHAPES = (
    "M{x} {y}m-2.8 0a2.8 2.8 0 1 0 5.6 0a2.8 2.8 0 1 0-5.6 0",  # circle
    "M{x} {y}m-2.5-2.5h5v5h-5z",  # square
    "M{x} {y}m0-3.4l3.2 5.7h-6.4z",  # triangle
    "M{x} {y}m0-3.6l3.3 3.6l-3.3 3.6l-3.3-3.6z",  # diamond
    "M{x} {y}m0 3.4l3.2-5.7h-6.4z",  # triangle on its tip
    "M{x} {y}m-3-1h2v-2h2v2h2v2h-2v2h-2v-2h-2z",  # cross
)


Unit = Literal["number", "seconds", "percent"]
_FORMATTERS: dict[Unit, Callable[[float], str]] = {
    "number": text.number,
    "seconds": text.seconds,
    "percent": text.percent,
}


@dataclass(frozen=True)
class LineStyle:
    """The colour, the dashes and the mark of a curve, chosen by the curve's number."""

    number: int

    @property
    def colour(self) -> int:
        """The number of the colour in the page's style sheet."""
        return self.number % COLOURS

    @property
    def dash(self) -> str:
        """The lengths of dashes and gaps; "" for a solid line."""
        return _DASHES[self.number % len(_DASHES)]

    def shape(self, x: float, y: float) -> str:
        """The SVG path of a mark at (x, y)."""
        return _SHAPES[self.number % len(_SHAPES)].format(x=f"{x:.1f}", y=f"{y:.1f}")


@dataclass(frozen=True)
class Line:
    """A curve: its name, its points (NaN for a gap), and its number, which decides its line style.

    `run` is the number of its run, for the page's legend; None if the page shows one run.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    number: int
    run: int | None = None

    @property
    def line_style(self) -> LineStyle:
        """The colour, dashes and mark of the curve."""
        return LineStyle(self.number)


@dataclass(frozen=True)
class ChartMark:
    """An event at a position: its kind, "alarm" or "attempt", and a sentence about it."""

    x: float
    kind: str
    text: str
    run: int | None = None


@dataclass(frozen=True)
class Axis:
    """The horizontal axis: its name, whether it has whole numbers only, and its start (None: the curves').

    `formatter` formats the labels of the ticks; `unit` is the unit of positions that the page shows on hover.
    """

    name: str
    whole: bool = False
    start: float | None = None
    formatter: Callable[[float], str] = text.number
    unit: Unit = "number"


@dataclass(frozen=True)
class Chart:
    """A chart as markup.

    If points were left out, `asked` and `shown` are the numbers of points given and drawn; else both are 0.
    `wide` also holds the drawing for a whole card, which the page shows if there is room; "" if there is
    none.
    """

    html: str = ""
    asked: int = 0
    shown: int = 0
    wide: str = ""


def line_chart(
    title: str,
    lines: Sequence[Line],
    axis: Axis,
    *,
    unit: Unit = "number",
    marks: Sequence[ChartMark] = (),
    from_zero: bool = False,
    values: Iterable[float] | None = None,
    most: int = 600,
    adjustable: bool = False,
) -> Chart:
    """Draw curves over each other.

    Args:
        title: the name of the values.
        lines: the curves; curves without a value are left out.
        axis: the horizontal axis.
        unit: the unit of the values.
        marks: events to mark on the horizontal axis.
        from_zero: whether the axis of values begins at 0.
        values: further values that the axis of values must include, so that two charts have equal axes.
        most: about how many points a curve may have; longer curves are thinned.
        adjustable: whether the page's script offers a logarithmic axis and smoothing.

    Returns:
        The chart; an empty one if no curve has a value.
    """
    title = text.cut(title)
    lines = [line for line in lines if any(value == value for value in line.y)]
    if not lines:
        return Chart()
    thinned = [thin_curve(line.x, line.y, most) for line in lines]
    drawn = [
        Line(line.label, x, y, line.number, line.run) for line, (x, y, _) in zip(lines, thinned, strict=True)
    ]
    marks, _ = thin_list(marks, _MARKS)
    ends = [x for line in drawn for x in (line.x[0], line.x[-1])] + [mark.x for mark in marks]
    ends += [] if axis.start is None else [axis.start]
    across = position_scale(min(ends), max(ends))
    formatter = _FORMATTERS[unit]
    up = value_scale([*(y for line in drawn for y in line.y), *(values or ())], from_zero=from_zero)
    ticks = [(tick, formatter(tick)) for tick in up.ticks(5)]
    summary = _summary(title, drawn, axis, formatter)
    legend = drawn if len(drawn) > 1 and drawn[0].run is None else ()
    plot = _Plot(across, up, ticks)
    made = partial(drawings.line_chart, title, up.log, legend, data=plot.data(drawn, axis, unit))
    drawing = drawings.plot(plot, drawn, axis, marks, summary)
    html, wide = made(drawing=drawing, adjustable=adjustable, wide=""), ""
    if not adjustable:
        whole = drawings.plot(_Plot(across, up, ticks, width=WIDE), drawn, axis, marks, summary)
        wide = made(drawing=drawing, adjustable=False, wide=whole)
    some_left_out = any(left_out for *_, left_out in thinned)
    asked, shown = sum(len(line.x) for line in lines), sum(len(line.x) for line in drawn)
    return Chart(html, asked if some_left_out else 0, shown if some_left_out else 0, wide)


def swatch(number: int) -> Markup:
    """A sample of the line of the curve with this number, for a legend."""
    return drawings.swatch(LineStyle(number))


class _Plot:
    """Converts values to coordinates of the drawing."""

    def __init__(
        self, across: Scale, up: Scale, ticks: Sequence[tuple[float, str]], *, width: float = WIDTH
    ) -> None:
        self.across, self.up, self.ticks = across, up, ticks
        self.width, self.height, self.top, self.base = width, HEIGHT, _TOP, HEIGHT - _BOTTOM
        self.left = 12 + _CHARACTER * max((len(label) for _, label in ticks), default=1)
        self.right = width - _RIGHT

    def x(self, value: float) -> float:
        return self.left + self.across.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.base - self.up.share(value) * (self.base - self.top)

    def heights(self) -> list[tuple[float, str]]:
        """The y coordinates of the horizontal grid lines, and their labels."""
        return [(self.y(value), label) for value, label in self.ticks]

    def labels(self, axis: Axis) -> Iterator[tuple[float, str]]:
        """The x coordinates and texts of the axis labels, without labels that would touch a neighbour."""
        end = 0.0
        for value in self._x_ticks(axis):
            label = axis.formatter(value)
            half = len(label) * _CHARACTER / 2
            x = min(self.x(value), self.width - half - 1)
            if x - half >= end + 6:
                end = x + half
                yield x, label

    def _x_ticks(self, axis: Axis) -> list[float]:
        if self.across.high - self.across.low == 1 and self.across.low % 1 == 0.5:
            return [self.across.low + 0.5]  # a single position
        return self.across.ticks(7 if axis.whole else 6, whole=axis.whole)

    def line(self, line: Line) -> tuple[str, list[tuple[float, float]]]:
        """A curve's path, and the places of its marks: each point if there are few, else the last one."""
        pieces, pen_down = [], False
        places = []
        for x, y in zip(line.x, line.y, strict=True):
            if y != y:
                pen_down = False
                continue
            # A point between two gaps is a line of zero length, which round line caps draw as a dot.
            at = f"{self.x(x):.1f} {self.y(y):.1f}"
            pieces.append(("L" if pen_down else "M") + at + ("" if pen_down else "h0"))
            places.append((self.x(x), self.y(y)))
            pen_down = True
        return "".join(pieces), places if len(line.x) <= _MARKED else places[-1:]

    def mark(self, x: float) -> float:
        """The x coordinate of a mark."""
        return self.x(min(max(x, self.across.low), self.across.high))

    def data(self, lines: Sequence[Line], axis: Axis, unit: Unit) -> Markup:
        """The data with which the script shows values on hover: the axes, and each curve's points."""
        return text.embed(
            {
                "box": [round(self.left, 1), self.right],
                "heights": [self.top, self.base],
                "values": [_short(self.up.low), _short(self.up.high)],
                "log": self.up.log,
                "ends": [self.across.low, self.across.high],
                "axis": axis.name,
                "units": [axis.unit, unit],
                "lines": [
                    {
                        "name": text.clean(line.label),
                        "style": line.line_style.colour,
                        "run": line.run,
                        "x": [_short(x) for x in line.x],
                        "y": [_short(y) for y in line.y],
                    }
                    for line in lines
                ],
            }
        )


def _summary(title: str, lines: Sequence[Line], axis: Axis, formatter: Callable[[float], str]) -> str:
    """A chart in words, for screen readers."""
    parts = []
    for line in lines[:6]:
        known = [value for value in line.y if value == value]
        parts.append(
            f"{line.label}: from {formatter(known[0])} to {formatter(known[-1])}, lowest "
            f"{formatter(min(known))}, highest {formatter(max(known))}"
        )
    more = f"; and {len(lines) - 6} more curves" if len(lines) > 6 else ""
    return f"{title} by {axis.name}. {'; '.join(parts)}{more}"


def _short(value: float) -> float | int | None:
    """A number rounded to six significant digits, for JSON; None for NaN and infinity."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e9 else rounded
