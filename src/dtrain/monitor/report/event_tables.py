"""The tables of the runs' alarms, checkpoints and attempts.

It draws no curves; `curves.py` marks the same alarms and attempts in its charts.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from dtrain.monitor.report import text
from dtrain.monitor.report.markup import parts
from dtrain.monitor.report.tables import Column, Row, numbers, table
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import Run

_MOST = 60


def alarm_section(runs: Sequence[Run]) -> Markup:
    """The table of alarms, such as a loss that is NaN or jumps, or a late checkpoint."""
    rows = [
        Row(
            [
                parts.badge("failed", "▼", alarm.kind),
                text.position(alarm.epoch),
                text.count(alarm.step),
                "NaN" if alarm.kind == "nan" and alarm.value is None else text.number(alarm.value),
                _moment(alarm.time),
                alarm.text,
            ],
            run=place,
        )
        for place, run in enumerate(runs)
        for alarm in run.alarms
    ]
    columns = [("alarm", ""), *numbers("epoch", "step", "value"), ("when", ""), ("what", "long")]
    return _listed("Alarms", runs, columns, rows)


def checkpoint_section(runs: Sequence[Run]) -> Markup:
    """The list and the table of checkpoints, with how long each blocked training."""
    rows = [
        Row([text.count(each.step), text.seconds(each.seconds), _moment(each.time), each.text], run=place)
        for place, run in enumerate(runs)
        for each in run.checkpoints
    ]
    if not rows:
        return Markup()
    said = []
    for run in runs:
        costs = [each.seconds for each in run.checkpoints if each.seconds is not None]
        if run.checkpoints:
            name = f"{run.name}: " if len(runs) > 1 else ""
            cost = f", training stood still for {text.seconds(sum(costs))} in all" if costs else ""
            longest = f" and {text.seconds(max(costs))} at most" if len(costs) > 1 else ""
            said.append(f"{name}{text.plural(len(run.checkpoints), 'checkpoint')}{cost}{longest}.")
    columns = [*numbers("step", "stood still"), ("when", ""), ("what", "")]
    listed = _listed("Checkpoints", runs, columns, rows)
    return parts.plain_list(said) + parts.folded("all in a table", listed)


def attempt_section(runs: Sequence[Run]) -> Markup:
    """The table of attempts of runs that were started more than once."""
    rows = [
        Row(
            [
                text.count(attempt.number),
                _moment(attempt.began),
                text.seconds(attempt.seconds),
                text.position(attempt.first_epoch),
                text.count(attempt.workers),
                text.count(attempt.replicas),
                attempt.status or (run.state_text if attempt is run.attempts[-1] else "without a word"),
            ],
            run=place,
        )
        for place, run in enumerate(runs)
        for attempt in run.attempts
        if len(run.attempts) > 1
    ]
    columns = [*numbers("attempt"), ("began", ""), *numbers("lasted", "first epoch", "workers", "replicas")]
    return _listed("Attempts", runs, [*columns, ("ended", "")], rows)


def _listed(caption: str, runs: Sequence[Run], columns: Sequence[Column], rows: Sequence[Row]) -> Markup:
    """A table; of many rows, those in the middle are left out. Empty without rows."""
    if not rows:
        return Markup()
    shown, left_out = thin_list(rows, _MOST * max(1, min(len(runs), 5)))
    more = parts.quiet(f"{left_out:,} in the middle are left out here.") if left_out else Markup()
    return table(caption, columns, shown, tall=True, runs=runs) + more


def _moment(time: float) -> str:
    """A Unix time as date and time in the local time zone."""
    found = text.moment(time)
    return text.UNKNOWN if found is None else f"{found:%Y-%m-%d %H:%M:%S}"
