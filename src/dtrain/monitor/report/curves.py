"""Which curves a page shows: metrics by epoch, and what was noted each second of training.

One run shows training and validation in one chart; several runs are drawn over each other, training and
validation beside each other with one axis of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dtrain.monitor.report.charts import Axis, Chart, Line, Mark, Unit, line_chart
from dtrain.monitor.report.markup import drawings
from dtrain.monitor.run_data import Alarm, Epoch, Run

_VALIDATION = "val_"
_RATE_LOG = "learning_rate"
_FIRST = ("loss", "accuracy")
_MOST_METRICS = 30
_POINTS = 50_000
_FEW = 2  # charts that take the width of their card between them
_MOST_POINTS, _FEWEST_POINTS = 600, 24

_LOSS = "loss"
_EPOCHS = Axis("epoch", whole=True)
_STEPS = Axis("step", whole=True, start=0.0)


@dataclass(frozen=True)
class Curves:
    """Charts, and sentences about what they leave out."""

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


def metric_curves(runs: Sequence[Run]) -> Curves:
    """Loss, accuracy and all other metrics by epoch, and the loss by step."""
    names = _metrics(runs)
    most = _points(runs, len(names))
    charts: list[Chart] = []
    for name in names[:_MOST_METRICS]:
        charts += _of_one(runs[0], name, most) if len(runs) == 1 else _of_several(runs, name, most)
    charts.append(_by_step(runs, "loss", "loss, step by step", most))
    for tag in sorted({tag for run in runs for tag in run.scalars})[:_MOST_METRICS]:
        charts.append(_scalar(runs, tag, most))
    notes = []
    if len(names) > _MOST_METRICS:
        notes.append(f"{len(names) - _MOST_METRICS} of {len(names)} metrics are not drawn.")
    return Curves(tuple(chart for chart in charts if chart.html), tuple(notes))


def speed_curves(runs: Sequence[Run]) -> Curves:
    """Examples a second, the time of a step, the wait for data and the learning rate."""
    most = _points(runs, len(_metrics(runs)))
    noted = [run for run in runs if run.steps.has("examples_per_second")]
    charts = []
    if len(noted) == len(runs):
        charts.append(_by_clock(runs, "examples_per_second", "examples/s", most))
    else:  # what all runs have, so that all are in one chart
        charts.append(_rate_by_epoch(runs, most))
        charts.append(_by_clock(runs, "examples_per_second", "examples/s", most))
    charts.append(_by_clock(runs, "step_seconds", "time of a step", most, unit="seconds"))
    charts.append(_by_clock(runs, "data_wait", "waiting for data", most, unit="percent"))
    if any(run.steps.has("learning_rate") for run in runs):
        charts.append(_by_step(runs, "learning_rate", "learning rate", most))
    else:
        charts.append(_log_by_epoch(runs, _RATE_LOG, "learning rate", most))
    return Curves(tuple(chart for chart in charts if chart.html))


def _points(runs: Sequence[Run], metrics: int) -> int:
    """How many points a curve may have, so that the page does not grow without bound."""
    curves = len(runs) * (min(metrics, _MOST_METRICS) * 2 + 5)
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS // curves))


def _metrics(runs: Sequence[Run]) -> list[str]:
    """The metrics that any run has, without `val_`: loss and accuracy first, then the others by name."""
    found = {
        name.removeprefix(_VALIDATION) for run in runs for epoch in run.epochs for name in epoch.logs
    } - {_RATE_LOG, ""}
    return [name for name in _FIRST if name in found] + sorted(found - set(_FIRST))


def _of_one(run: Run, name: str, most: int) -> list[Chart]:
    lines = [
        _epoch_line(run, name, "training", 0),
        _epoch_line(run, _VALIDATION + name, "validation", 1),
    ]
    marks = _epoch_marks([run], None)
    return [line_chart(name, lines, _EPOCHS, marks=marks, most=most, adjustable=name == _LOSS)]


def _of_several(runs: Sequence[Run], name: str, most: int) -> list[Chart]:
    training = [_epoch_line(run, name, run.name, place, place) for place, run in enumerate(runs)]
    validation = [
        _epoch_line(run, _VALIDATION + name, run.name, place, place) for place, run in enumerate(runs)
    ]
    values = [value for line in training + validation for value in line.y]
    if not any(value == value for line in validation for value in line.y):
        marks = _epoch_marks(runs, True)
        return [line_chart(name, training, _EPOCHS, marks=marks, most=most, adjustable=name == _LOSS)]
    return [
        line_chart(
            f"{name}, {kind}",
            lines,
            _EPOCHS,
            marks=_epoch_marks(runs, True),
            values=values,
            most=most,
            adjustable=name == _LOSS,
        )
        for kind, lines in (("training", training), ("validation", validation))
    ]


def _epoch_line(run: Run, name: str, label: str, style: int, place: int | None = None) -> Line:
    return _line_of(run, lambda epoch: epoch.logs.get(name), label, style, place)


def _line_of(
    run: Run, value: Callable[[Epoch], float | None], label: str, style: int, place: int | None
) -> Line:
    values = [value(epoch) for epoch in run.epochs]
    return Line(
        label,
        [float(epoch.number + 1) for epoch in run.epochs],
        [math.nan if each is None else each for each in values],
        style,
        place,
    )


def _rate_by_epoch(runs: Sequence[Run], most: int) -> Chart:
    lines = [
        _line_of(run, lambda epoch: epoch.examples_per_second, run.name, place, _place(runs, place))
        for place, run in enumerate(runs)
    ]
    return line_chart("examples/s", lines, _EPOCHS, from_zero=True, most=most)


def _log_by_epoch(runs: Sequence[Run], name: str, title: str, most: int) -> Chart:
    lines = [_epoch_line(run, name, run.name, place, _place(runs, place)) for place, run in enumerate(runs)]
    return line_chart(title, lines, _EPOCHS, from_zero=True, most=most)


def _by_step(runs: Sequence[Run], column: str, title: str, most: int) -> Chart:
    if not any(run.steps.has(column) for run in runs):
        return Chart()
    lines, marks = [], []
    for place, run in enumerate(runs):
        kept = run.steps.counted
        values = run.steps.values[column]
        lines.append(
            Line(
                run.name,
                [run.steps.step[each] for each in kept],
                [values[each] for each in kept],
                place,
                _place(runs, place),
            )
        )
        marks += [
            Mark(float(alarm.step), "alarm", told, _place(runs, place))
            for alarm, told in _alarms(run, len(runs) > 1)
            if alarm.step is not None
        ]
    return line_chart(
        title,
        lines,
        _STEPS,
        marks=marks if column == _LOSS else (),
        from_zero=column == _RATE_LOG,
        most=most,
        adjustable=column == _LOSS,
    )


def _by_clock(runs: Sequence[Run], column: str, title: str, most: int, *, unit: Unit = "number") -> Chart:
    if not any(run.steps.has(column) for run in runs):
        return Chart()
    lines, marks = [], []
    for place, run in enumerate(runs):
        lines.append(Line(run.name, run.steps.clock, run.steps.values[column], place, _place(runs, place)))
        marks += _attempt_marks(run, _place(runs, place))
    longest = max((line.x[-1] for line in lines if line.x), default=0.0)
    axis = Axis("time trained", start=0.0, told=_clock_unit(longest), unit="seconds")
    return line_chart(title, lines, axis, unit=unit, marks=marks, from_zero=True, most=most)


def _clock_unit(longest: float) -> Callable[[float], str]:
    """How positions on an axis of times are told: all in one unit."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if longest >= 3 * size:
            return lambda value: f"{value / size:.3g} {unit}"
    return lambda value: f"{value:.3g} s"


def _scalar(runs: Sequence[Run], tag: str, most: int) -> Chart:
    lines = []
    for place, run in enumerate(runs):
        points = run.scalars.get(tag, ())
        lines.append(
            Line(run.name, [x for x, _ in points], [y for _, y in points], place, _place(runs, place))
        )
    return line_chart(tag, lines, _STEPS, most=most)


def _place(runs: Sequence[Run], place: int) -> int | None:
    """The run's number for the page's legend, if there is one."""
    return place if len(runs) > 1 else None


def _epoch_marks(runs: Sequence[Run], several: bool | None) -> list[Mark]:
    marks = []
    for place, run in enumerate(runs):
        for alarm, told in _alarms(run, bool(several)):
            x = run.epoch_position(alarm.epoch, alarm.step)
            if x is not None:
                marks.append(Mark(x, "alarm", told, place if several else None))
    return marks


def _alarms(run: Run, several: bool) -> list[tuple[Alarm, str]]:
    """The alarms and a sentence on each."""
    found = []
    for alarm in run.alarms:
        where = f"step {alarm.step:,}" if alarm.step is not None else ""
        said = alarm.text or alarm.kind
        found.append((alarm, f"{run.name + ': ' if several else ''}{said}{f' ({where})' if where else ''}"))
    return found


def _attempt_marks(run: Run, place: int | None) -> list[Mark]:
    marks, before = [], 0.0
    for former, attempt in zip(run.attempts, run.attempts[1:], strict=False):
        before += former.seconds
        marks.append(Mark(before, "attempt", f"{run.name}: attempt {attempt.number} begins", place))
    return marks
