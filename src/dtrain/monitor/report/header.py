"""The top of the page: what was run, when, how it ended, and the most important figures.

It takes each value from the run's record, or else from its events. It draws no charts.
"""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dtrain.monitor.event_file import finite
from dtrain.monitor.report import text
from dtrain.monitor.report.markup import parts
from dtrain.monitor.report.names import run_name, state_badge
from dtrain.monitor.report.tables import Row, numbers, table
from dtrain.monitor.run_data import Run
from dtrain.training_rate import Figures, of_run


@dataclass(frozen=True)
class Figure:
    """A figure of a run: its name, its value as text, and a note on what it covers."""

    name: str
    value: str
    note: str = ""


def rate(run: Run) -> float | None:
    """Examples per second over all replicas: from the record, else from all epochs after the first."""
    rates = [epoch.examples_per_second for epoch in run.epochs if epoch.examples_per_second is not None]
    noted = [value for value in run.steps.values["examples_per_second"] if value == value]
    return _first(
        finite(run.record.get("examples_per_second")),
        _steady(run).examples_per_second,
        statistics.median(rates[1:] or rates) if rates else None,
        statistics.median(noted) if noted else None,
    )


def wall_time(run: Run) -> float | None:
    """Seconds from start to end, from the record; else the sum over all attempts."""
    attempts = sum(attempt.seconds for attempt in run.attempts)
    return _first(finite(run.record.get("wall_time_seconds")), attempts if attempts > 0 else None)


def part_share(run: Run, part: str) -> float | None:
    """The share of a part in the time of all epochs; None if the time by part is unknown."""
    parts = run.parts
    total = sum(parts.values())
    return parts.get(part, 0.0) / total if total > 0 else None


def data_wait(run: Run) -> float | None:
    """The share of the time spent waiting for data."""
    recorded = run.record.get("input")
    return _first(
        part_share(run, "input"), finite(recorded.get("share")) if isinstance(recorded, dict) else None
    )


def figures(run: Run) -> list[Figure]:
    """The headline figures of a run; every run has the same number of figures in the same order."""
    replicas = finite(run.record.get("replicas"))
    return [
        Figure("examples/s", text.number(rate(run)), "over all replicas" if replicas != 1 else ""),
        Figure("time of a step", text.seconds(_step(run)), "tracing left out"),
        Figure("wall time", text.seconds(wall_time(run)), _epoch_count(run)),
        Figure("waiting for data", text.percent(data_wait(run)), "of the time"),
        Figure("communication", text.percent(part_share(run, "communication")), "of the epochs' time"),
        _metric(run, "loss"),
        _metric(run, "accuracy"),
    ]


def _step(run: Run) -> float | None:
    """Seconds of a step: from the record, else from all epochs after the first, else the median by time."""
    recorded = finite(run.record.get("step_seconds"))
    return _first(recorded, _steady(run).step_seconds, run.steps.step_seconds)


def _first(*values: float | None) -> float | None:
    """The first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def _steady(run: Run) -> Figures:
    """The figures of the steps in which no function was traced, of all epochs after the first."""
    return of_run(epoch.steady for epoch in run.epochs if epoch.steady is not None)


def _epoch_count(run: Run) -> str:
    planned = finite(run.record.get("epochs"))
    done = len(run.epochs)
    if planned is not None and done < planned:
        return f"{done} of {planned:g} epochs"
    return text.plural(done, "epoch")


def _metric(run: Run, name: str) -> Figure:
    """The last value of a metric on the test data; else on the validation data; else on the training data."""
    trained = run.final(name)
    for prefix, data in _DATA.items():
        if (value := run.final(prefix + name)) is not None:
            return Figure(f"{data} {name}", text.number(value), f"training {text.number(trained)}")
    return Figure(f"final {name}", text.number(trained), "" if trained is None else "training")


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The facts below the heading: those of one run, or a summary of several."""
    found = _facts(runs[0]) if len(runs) == 1 else _common_facts(runs)
    return [(name, value) for name, value in found.items() if value]


def _common_facts(runs: Sequence[Run]) -> dict[str, str]:
    """The facts that summarize several runs."""
    found = [_facts(run) for run in runs]
    states = Counter(run.state for run in runs)
    started = sorted(filter(None, (each["started"] for each in found)))
    common = {
        name: "; ".join(dict.fromkeys(each[name] for each in found if each[name]))
        for name in ("recipe", "strategy", "versions")
    }
    return {
        "runs": ", ".join(f"{count} {state}" for state, count in states.items()),
        **common,
        "started": " to ".join(dict.fromkeys([*started[:1], *started[-1:]])),
    }


def _facts(run: Run) -> dict[str, str]:
    record = run.record
    versions = record.get("versions")
    begin = run.attempts[-1] if run.attempts else None
    # Earlier versions recorded the parameters under the name `weights`.
    parameters = finite(record.get("parameters", record.get("weights")))
    named = versions.items() if isinstance(versions, dict) else ()
    return {
        "recipe": _said(record.get("recipe")),
        "strategy": _said(record.get("strategy")) or (begin.strategy if begin else ""),
        "replicas": _said(record.get("replicas")),
        "workers": _said(record.get("workers")),
        "parameter servers": _said(record.get("parameter_servers")),
        "communication": _communication(record.get("communication")),
        "started": _said(record.get("started_at")).replace("T", " ") or _started(run),
        "command": _command(record.get("command")),
        "host": _said(record.get("host")),
        "commit": _commit(record.get("commit")),
        "parameters": "" if parameters is None else f"{parameters:,.0f}",
        "versions": ", ".join(f"{name} {version}" for name, version in named),
        "directory": str(run.path),
    }


def _said(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _communication(value: object) -> str:
    """How the workers all-reduced, from the record's dictionary or one word."""
    if isinstance(value, dict):
        return _said(value.get("name") or value.get("transport") or value.get("implementation"))
    return _said(value)


def _started(run: Run) -> str:
    began = text.moment(run.attempts[0].began) if run.attempts else None
    return "" if began is None else began.isoformat(sep=" ", timespec="seconds")


def _commit(value: object) -> str:
    """The commit of the user's repository, and whether its files had uncommitted changes."""
    if not isinstance(value, dict) or not (said := _said(value.get("id"))):
        return ""
    return said[:12] + (", with changes that are not committed" if value.get("changed") is True else "")


def _command(value: object) -> str:
    if isinstance(value, list):
        return shlex.join(str(word) for word in value)
    return _said(value)


def tiles(run: Run) -> Markup:
    """The headline figures of one run as tiles."""
    shown = [figure for figure in figures(run) if figure.value != text.UNKNOWN]
    return parts.tiles(shown) if shown else Markup()


def comparison(runs: Sequence[Run], failed: Sequence[tuple[str, str]]) -> Markup:
    """The table of the figures of several runs, with rows for directories that could not be read."""
    metrics = [name for name in _METRICS if any(run.final(name) is not None for run in runs)][:_MOST_METRICS]
    rows = []
    for place, run in enumerate(runs):
        cells = [
            run_name(run, place),
            state_badge(run),
            _where(run),
            *(text.number(run.final(name)) for name in metrics),
            text.number(rate(run)),
            text.seconds(_step(run)),
            text.seconds(wall_time(run)),
            f"{len(run.epochs):,}",
            text.percent(data_wait(run)),
            text.percent(part_share(run, "communication")),
        ]
        rows.append(Row(cells, run=place))
    columns = [("run", ""), ("state", ""), ("strategy", ""), *numbers(*map(_in_words, metrics))]
    columns += numbers("examples/s", "step", "wall time", "epochs", "waiting for data", "communication")
    for path, _ in failed:
        said = parts.badge("failed", "✕", "no report")
        blank = [text.UNKNOWN] * (len(columns) - 2)
        rows.append(Row([path, said, *blank], style="bad"))
    return table("The runs and their figures", columns, rows)


def _in_words(metric: str) -> str:
    for prefix, data in _DATA.items():
        if metric.startswith(prefix):
            return f"{data} {metric.removeprefix(prefix)}"
    return f"training {metric}"


def _where(run: Run) -> str:
    replicas = finite(run.record.get("replicas"))
    many = "" if replicas is None else f", {text.plural(int(replicas), 'replica')}"
    return _said(run.record.get("strategy")) + many or text.UNKNOWN


_METRICS = ("test_accuracy", "val_accuracy", "accuracy", "test_loss", "val_loss", "loss")
_MOST_METRICS = 4
_DATA = {"test_": "test", "val_": "validation"}
