"""What happened on the way: alarms, checkpoints and attempts, in tables.

It lists; the curves mark the same alarms and attempts where they lie.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from markupsafe import Markup

from dtrain.monitor.report import text
from dtrain.monitor.report.markup import parts
from dtrain.monitor.report.names import run_name
from dtrain.monitor.report.tables import Cell, Column, Row, table
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import Run

_MOST = 60

Cells = list[str | Cell]


def alarm_section(runs: Sequence[Run]) -> Markup:
    """Where the loss was no number, or jumped."""
    columns = [
        Column("alarm"),
        Column("epoch", numbers=True),
        Column("step", numbers=True),
        Column("value", numbers=True),
        Column("when"),
        Column("what", style="long"),
    ]
    rows: list[tuple[int, Cells]] = []
    for place, run in enumerate(runs):
        for alarm in run.alarms:
            rows.append(
                (
                    place,
                    [
                        parts.badge("failed", "▼", alarm.kind),
                        text.count(None if alarm.epoch is None else alarm.epoch + 1),
                        text.count(alarm.step),
                        "NaN" if alarm.kind == "nan" and alarm.value is None else text.number(alarm.value),
                        _moment(alarm.time),
                        Cell(alarm.text, style="long"),
                    ],
                )
            )
    return _listed("Alarms", runs, columns, rows)


def checkpoint_section(runs: Sequence[Run]) -> Markup:
    """What was saved, and what that cost."""
    columns = [
        Column("step", numbers=True),
        Column("stood still", numbers=True),
        Column("when"),
        Column("what"),
    ]
    rows: list[tuple[int, Cells]] = []
    said = []
    for place, run in enumerate(runs):
        for each in run.checkpoints:
            rows.append(
                (place, [text.count(each.step), text.seconds(each.seconds), _moment(each.time), each.text])
            )
        costs = [each.seconds for each in run.checkpoints if each.seconds is not None]
        if run.checkpoints:
            name = f"{run.name}: " if len(runs) > 1 else ""
            cost = f", training stood still for {text.seconds(sum(costs))} in all" if costs else ""
            longest = f" and {text.seconds(max(costs))} at most" if len(costs) > 1 else ""
            said.append(f"{name}{text.plural(len(run.checkpoints), 'checkpoint')}{cost}{longest}.")
    if not rows:
        return Markup()
    listed = _listed("Checkpoints", runs, columns, rows)
    return parts.plain_list(said) + parts.folded("all in a table", listed)


def attempt_section(runs: Sequence[Run]) -> Markup:
    """Who was started more than once."""
    columns = [
        Column("attempt", numbers=True),
        Column("began"),
        Column("lasted", numbers=True),
        Column("first epoch", numbers=True),
        Column("workers", numbers=True),
        Column("replicas", numbers=True),
        Column("ended"),
    ]
    rows: list[tuple[int, Cells]] = []
    for place, run in enumerate(runs):
        if len(run.attempts) < 2:
            continue
        for attempt in run.attempts:
            last = attempt is run.attempts[-1]
            rows.append(
                (
                    place,
                    [
                        text.count(attempt.number),
                        _moment(attempt.began),
                        text.seconds(attempt.seconds),
                        text.count(None if attempt.first_epoch is None else attempt.first_epoch + 1),
                        text.count(attempt.workers),
                        text.count(attempt.replicas),
                        attempt.status or (run.state_text if last else "without a word"),
                    ],
                )
            )
    return _listed("Attempts", runs, columns, rows)


def _listed(
    caption: str, runs: Sequence[Run], columns: Sequence[Column], rows: Sequence[tuple[int, Cells]]
) -> Markup:
    """A table of what happened, with the run's name in front where there are several."""
    if not rows:
        return Markup()
    several = len(runs) > 1
    shown, left_out = thin_list(rows, _MOST * max(1, min(len(runs), 5)))
    made = [
        Row([run_name(runs[place], place), *cells], run=place) if several else Row(cells)
        for place, cells in shown
    ]
    more = parts.quiet(f"{left_out:,} in the middle are left out here.") if left_out else Markup()
    return table(caption, [Column("run"), *columns] if several else columns, made, tall=True) + more


def _moment(time: float) -> str:
    """A Unix time as people here write it."""
    try:
        return datetime.datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return text.UNKNOWN
