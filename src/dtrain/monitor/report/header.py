"""The top of the page: what was run, when, how it ended, and the most important figures.

It takes each value from the run's record, or else from its events. It draws no charts.
"""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from dtrain.base.words import counted
from dtrain.monitor.line_files import finite
from dtrain.monitor.report import text
from dtrain.monitor.report.markup import parts, sections
from dtrain.monitor.run_data import RunData
from dtrain.telemetry.training_rate import of_run


class Figure(NamedTuple):
    """A figure of a run: its name, its value as text, and a note on what it covers."""

    name: str
    value: str
    note: str = ""


class Measures(NamedTuple):
    """What the page says about a run in numbers, in seconds and shares; None where it is unknown.

    Attributes:
        where: strategy and number of replicas.
        rate: examples per second over all replicas.
        step: seconds of a step.
        wall_time: seconds from start to end, over all attempts.
        data_wait: the share of the epochs' time spent waiting for data.
        communication: the share of the epochs' time spent on communication.
        goodput: the share of the wall time that went into steps which count.
    """

    where: str
    rate: float | None
    step: float | None
    wall_time: float | None
    data_wait: float | None
    communication: float | None
    goodput: float | None


def measures(run: RunData) -> Measures:
    """The numbers of a run: from its record, else from all epochs after the first, else from its steps."""
    record, parts = run.record, run.parts
    steady = of_run(epoch.steady for epoch in run.epochs if epoch.steady is not None)
    rates = [epoch.examples_per_second for epoch in run.epochs if epoch.examples_per_second is not None]
    noted = [value for value in run.steps.values["examples_per_second"] if value == value]
    replicas, recorded = finite(record.get("replicas")), record.get("input")
    many = "" if replicas is None else f", {counted(int(replicas), 'replica')}"
    total = sum(parts.values())
    unknown = {part for epoch in run.epochs for part in epoch.unmeasured}
    shares = {
        part: parts.get(part, 0.0) / total if total > 0 and part not in unknown else None
        for part in ("input", "communication")
    }
    return Measures(
        where=_text(record.get("strategy")) + many or text.UNKNOWN,
        rate=_first(
            finite(record.get("examples_per_second")),
            steady.examples_per_second,
            statistics.median(rates[1:] or rates) if rates else None,
            statistics.median(noted) if noted else None,
        ),
        step=_first(finite(record.get("step_seconds")), steady.step_seconds, run.steps.step_seconds),
        wall_time=_first(
            None if run.goodput is None else run.goodput.wall_seconds or None,
            finite(record.get("wall_time_seconds")),
            sum(attempt.seconds for attempt in run.attempts) or None,
        ),
        data_wait=_first(
            shares["input"], finite(recorded.get("share")) if isinstance(recorded, dict) else None
        ),
        communication=shares["communication"],
        goodput=None if run.goodput is None else run.goodput.share,
    )


def figures(run: RunData) -> list[Figure]:
    """The headline figures of a run; every run has the same number of figures in the same order."""
    of = measures(run)
    replicas = finite(run.record.get("replicas"))
    return [
        Figure("examples/s", text.number(of.rate), "over all replicas" if replicas != 1 else ""),
        Figure("time per step", text.seconds(of.step), "tracing left out"),
        Figure("wall time", text.seconds(of.wall_time), _epoch_count(run)),
        Figure("goodput", text.percent(of.goodput), "of the wall time"),
        Figure("waiting for data", text.percent(of.data_wait), "of the epochs' time"),
        Figure("communication", text.percent(of.communication), "of the epochs' time"),
        _metric(run, "loss"),
        _metric(run, "accuracy"),
    ]


def _first(*values: float | None) -> float | None:
    """The first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def _epoch_count(run: RunData) -> str:
    planned = finite(run.record.get("epochs"))
    done = len(run.epochs)
    if planned is not None and done < planned:
        return f"{done} of {planned:g} epochs"
    return counted(done, "epoch")


def _metric(run: RunData, name: str) -> Figure:
    """The last value of a metric on the test data; else on the validation data; else on the training data."""
    trained = run.final(name)
    for prefix, data in _DATA.items():
        if (value := run.final(prefix + name)) is not None:
            return Figure(f"{data} {name}", text.number(value), f"training {text.number(trained)}")
    return Figure(f"final {name}", text.number(trained), "" if trained is None else "training")


def facts(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """The facts below the heading: those of one run, or a summary of several."""
    if not runs:
        return []
    values = _facts(runs[0]) if len(runs) == 1 else _common_facts(runs)
    return [(name, value) for name, value in values.items() if value]


def _common_facts(runs: Sequence[RunData]) -> dict[str, str]:
    """The facts that summarize several runs."""
    all_facts = [_facts(run) for run in runs]
    states = Counter(run.state for run in runs)
    started = sorted(filter(None, (run_facts["started"] for run_facts in all_facts)))
    common = {
        name: "; ".join(dict.fromkeys(run_facts[name] for run_facts in all_facts if run_facts[name]))
        for name in ("recipe", "strategy", "versions")
    }
    return {
        "runs": ", ".join(f"{count} {state}" for state, count in states.items()),
        **common,
        "started": " to ".join(dict.fromkeys([*started[:1], *started[-1:]])),
    }


def _facts(run: RunData) -> dict[str, str]:
    record = run.record
    versions = record.get("versions")
    begin = run.attempts[-1] if run.attempts else None
    # Earlier versions recorded the parameters under the name `weights`.
    parameters = finite(record.get("parameters", record.get("weights")))
    named = versions.items() if isinstance(versions, dict) else ()
    return {
        "recipe": _text(record.get("recipe")),
        "strategy": _text(record.get("strategy")) or (begin.strategy if begin else ""),
        "replicas": _text(record.get("replicas")),
        "workers": _text(record.get("workers")),
        "parameter servers": _text(record.get("parameter_servers")),
        "communication": _communication(record.get("communication")),
        "started": _text(record.get("started_at")).replace("T", " ") or _started(run),
        "command": _command(record.get("command")),
        "host": _text(record.get("host")),
        "commit": _commit(record.get("commit")),
        "parameters": "" if parameters is None else f"{parameters:,.0f}",
        "bytes of parameters": _divided(record, "parameters"),
        "bytes of the optimizer": _divided(record, "optimizer"),
        "versions": ", ".join(f"{name} {version}" for name, version in named),
        "directory": str(run.path),
    }


def _divided(record: Mapping[str, Any], what: str) -> str:
    """The whole size of what is divided over the replicas, and a replica's; "" if nothing is."""
    divided = record.get("divided")
    sizes = divided.get(what) if isinstance(divided, dict) else None
    if not isinstance(sizes, dict):
        return ""
    whole, own = finite(sizes.get("whole")), finite(sizes.get("replica"))
    if whole is None or own is None:
        return ""
    return f"{text.size(int(whole))}, of which a replica holds {text.size(int(own))}"


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _communication(value: object) -> str:
    """How the workers all-reduced, from the record's dictionary or one word."""
    if isinstance(value, dict):
        return _text(value.get("name") or value.get("transport") or value.get("implementation"))
    return _text(value)


def _started(run: RunData) -> str:
    began = text.moment(run.attempts[0].began, zone=True) if run.attempts else text.UNKNOWN
    return "" if began == text.UNKNOWN else began


def _commit(value: object) -> str:
    """The commit of the user's repository, and whether its files had uncommitted changes."""
    if not isinstance(value, dict) or not (commit := _text(value.get("id"))):
        return ""
    return commit[:12] + (", with changes that are not committed" if value.get("changed") is True else "")


def _command(value: object) -> str:
    if isinstance(value, list):
        return shlex.join(str(word) for word in value)
    return _text(value)


def tiles(run: RunData) -> Markup:
    """The headline figures of one run as tiles."""
    shown = [figure for figure in figures(run) if figure.value != text.UNKNOWN]
    return parts.tiles(shown) if shown else Markup()


def comparison(runs: Sequence[RunData], names: Sequence[Markup], failed: Sequence[tuple[str, str]]) -> Markup:
    """The table of the figures of several runs, with rows for directories that could not be read."""
    metrics = [name for name in _METRICS if any(run.final(name) is not None for run in runs)][:_MOST_METRICS]
    headed = [(_in_words(name), name) for name in metrics]
    return sections.comparison(runs, names, headed, [measures(run) for run in runs], failed)


def _in_words(metric: str) -> str:
    for prefix, data in _DATA.items():
        if metric.startswith(prefix):
            return f"{data} {metric.removeprefix(prefix)}"
    return f"training {metric}"


_METRICS = ("test_accuracy", "val_accuracy", "accuracy", "test_loss", "val_loss", "loss")
_MOST_METRICS = 4
_DATA = {"test_": "test", "val_": "validation"}
