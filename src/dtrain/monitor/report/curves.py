"""Chooses the curves of a page: metrics by epoch, and values that were recorded about once a second.

For one run, training and validation share a chart. For several runs, training and validation have a chart
each, with equal axes of values, and each chart has a curve for each run. It does not draw; `charts.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dtrain.monitor.report.charts import Axis, Chart, ChartMark, Line, Unit, line_chart
from dtrain.monitor.report.markup import drawings
from dtrain.monitor.run_data import Epoch, RunAlarm, RunData

_VALIDATION = "val_"
_RATE_LOG = "learning_rate"
_FIRST = ("loss", "accuracy")
_MOST_METRICS = 30
_POINTS = 50_000
_FEW = 2  # the number of charts that share the width of their card
_MOST_POINTS, _FEWEST_POINTS = 600, 24

_LOSS = "loss"
_EPOCHS = Axis("epoch", whole=True)
_STEPS = Axis("step", whole=True, start=0.0)


@dataclass(frozen=True)
class Curves:
    """Charts, and sentences about metrics that they leave out."""

    charts: tuple[Chart, ...]
    notes: tuple[str, ...] = ()

    @property
    def html(self) -> Markup:
        """All charts beside each other; empty if there are none."""
        if not self.charts:
            return Markup()
        if len(self.charts) == 1 and self.charts[0].wide:
            return drawings.charts([self.charts[0].wide], " of1")
        few = " of2" if len(self.charts) == _FEW else ""
        return drawings.charts([chart.html for chart in self.charts], few)


Points = Callable[[RunData], tuple[Sequence[float], Sequence[float]]]
"""A function that gives the positions and the values of a run's curve, NaN for a gap."""


def metric_curves(runs: Sequence[RunData]) -> Curves:
    """Loss, accuracy and all other metrics by epoch, and the loss by step."""
    names = _metrics(runs)
    most = _points(runs, len(names))
    charts: list[Chart] = []
    for name in names[:_MOST_METRICS]:
        charts += _of_one(runs[0], name, most) if len(runs) == 1 else _of_several(runs, name, most)
    charts.append(_by_step(runs, _LOSS, "loss, step by step", most))
    notes = []
    if len(names) > _MOST_METRICS:
        notes.append(f"{len(names) - _MOST_METRICS} of {len(names)} metrics are not drawn.")
    return Curves(tuple(chart for chart in charts if chart.html), tuple(notes))


def speed_curves(runs: Sequence[RunData]) -> Curves:
    """Examples per second, the time of a step, the share of time waiting for data, and the learning rate."""
    most = _points(runs, len(_metrics(runs)))
    charts = []
    if not all(run.steps.has("examples_per_second") for run in runs):
        # Some runs lack the rate by time; all have it by epoch, so that one chart shows all runs.
        rates = _lines(runs, _by_epoch(lambda epoch: epoch.examples_per_second))
        charts.append(line_chart("examples/s", rates, _EPOCHS, from_zero=True, most=most))
    charts.append(_by_clock(runs, "examples_per_second", "examples/s", most))
    charts.append(_by_clock(runs, "step_seconds", "time per step", most, unit="seconds"))
    charts.append(_by_clock(runs, "data_wait", "waiting for data", most, unit="percent"))
    if any(run.steps.has(_RATE_LOG) for run in runs):
        charts.append(_by_step(runs, _RATE_LOG, "learning rate", most))
    else:
        rates = _lines(runs, _log(_RATE_LOG))
        charts.append(line_chart("learning rate", rates, _EPOCHS, from_zero=True, most=most))
    return Curves(tuple(chart for chart in charts if chart.html))


def _points(runs: Sequence[RunData], metrics: int) -> int:
    """How many points a curve may have, so that the size of the page stays limited."""
    curves = len(runs) * (min(metrics, _MOST_METRICS) * 2 + 5)
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS // curves))


def _metrics(runs: Sequence[RunData]) -> list[str]:
    """The metrics of all runs, without `val_`: loss and accuracy first, then the others by name."""
    metrics = {
        name.removeprefix(_VALIDATION) for run in runs for epoch in run.epochs for name in epoch.logs
    } - {_RATE_LOG, ""}
    return [name for name in _FIRST if name in metrics] + sorted(metrics - set(_FIRST))


def _lines(runs: Sequence[RunData], points: Points) -> list[Line]:
    """A curve for each run; if there are several runs, the page's legend can hide each."""
    return [Line(run.name, *points(run), place, _place(runs, place)) for place, run in enumerate(runs)]


def _by_epoch(value: Callable[[Epoch], float | None]) -> Points:
    def points(run: RunData) -> tuple[list[float], list[float]]:
        values = [value(epoch) for epoch in run.epochs]
        places = [float(epoch.number + 1) for epoch in run.epochs]
        return places, [math.nan if number is None else number for number in values]

    return points


def _log(name: str) -> Points:
    return _by_epoch(lambda epoch: epoch.logs.get(name))


def _counted(column: str) -> Points:
    """Values by step, without steps that a later attempt repeated."""

    def points(run: RunData) -> tuple[list[float], list[float]]:
        kept, values = run.steps.counted, run.steps.values[column]
        return [run.steps.step[index] for index in kept], [values[index] for index in kept]

    return points


def _of_one(run: RunData, name: str, most: int) -> list[Chart]:
    kinds = (("training", name), ("validation", _VALIDATION + name))
    lines = [Line(label, *_log(key)(run), number) for number, (label, key) in enumerate(kinds)]
    return [line_chart(name, lines, _EPOCHS, marks=_epoch_marks([run]), most=most, adjustable=name == _LOSS)]


def _of_several(runs: Sequence[RunData], name: str, most: int) -> list[Chart]:
    training, validation = _lines(runs, _log(name)), _lines(runs, _log(_VALIDATION + name))
    values = [value for line in training + validation for value in line.y]
    shown = {f"{name}, training": training, f"{name}, validation": validation}
    if not any(value == value for line in validation for value in line.y):
        shown = {name: training}
    marks, adjustable = _epoch_marks(runs), name == _LOSS
    return [
        line_chart(title, lines, _EPOCHS, marks=marks, values=values, most=most, adjustable=adjustable)
        for title, lines in shown.items()
    ]


def _by_step(runs: Sequence[RunData], column: str, title: str, most: int) -> Chart:
    if not any(run.steps.has(column) for run in runs):
        return Chart()
    loss = column == _LOSS
    marks = _alarm_marks(runs, lambda run, alarm: None if alarm.step is None else float(alarm.step))
    return line_chart(
        title,
        _lines(runs, _counted(column)),
        _STEPS,
        marks=marks if loss else (),
        from_zero=column == _RATE_LOG,
        most=most,
        adjustable=loss,
    )


def _by_clock(runs: Sequence[RunData], column: str, title: str, most: int, *, unit: Unit = "number") -> Chart:
    if not any(run.steps.has(column) for run in runs):
        return Chart()
    lines = _lines(runs, lambda run: (run.steps.clock, run.steps.values[column]))
    marks = [mark for place, run in enumerate(runs) for mark in _attempt_marks(run, _place(runs, place))]
    longest = max((line.x[-1] for line in lines if line.x), default=0.0)
    axis = Axis("time trained", start=0.0, formatter=_clock_unit(longest), unit="seconds")
    return line_chart(title, lines, axis, unit=unit, marks=marks, from_zero=True, most=most)


def _clock_unit(longest: float) -> Callable[[float], str]:
    """The format of positions on an axis of times: all in one unit, chosen by the longest time."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if longest >= 3 * size:
            return lambda value: f"{value / size:.3g} {unit}"
    return lambda value: f"{value:.3g} s"


def _place(runs: Sequence[RunData], place: int) -> int | None:
    """The run's number for the page's legend; None for a single run, which has no legend."""
    return place if len(runs) > 1 else None


def _epoch_marks(runs: Sequence[RunData]) -> list[ChartMark]:
    return _alarm_marks(runs, lambda run, alarm: run.epoch_position(alarm.epoch, alarm.step))


def _alarm_marks(
    runs: Sequence[RunData], position: Callable[[RunData, RunAlarm], float | None]
) -> list[ChartMark]:
    """A mark with a sentence for each alarm that has a position."""
    marks = []
    for place, run in enumerate(runs):
        for alarm in run.alarms:
            name = f"{run.name}: " if len(runs) > 1 else ""
            where = f" (step {alarm.step:,})" if alarm.step is not None else ""
            if (x := position(run, alarm)) is not None:
                sentence = f"{name}{alarm.text or alarm.kind}{where}"
                marks.append(ChartMark(x, "alarm", sentence, _place(runs, place)))
    return marks


def _attempt_marks(run: RunData, place: int | None) -> list[ChartMark]:
    marks, before = [], 0.0
    for former, attempt in zip(run.attempts, run.attempts[1:], strict=False):
        before += former.seconds
        marks.append(ChartMark(before, "attempt", f"{run.name}: attempt {attempt.number} begins", place))
    return marks
