"""The section on settings: everything in a run's record, and for several runs where their settings differ.

The record also holds results; they are listed, but differences in them are not marked.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from dtrain.monitor.report import text
from dtrain.monitor.report.markup import parts
from dtrain.monitor.report.names import run_name
from dtrain.monitor.report.tables import Row, table
from dtrain.monitor.run_data import Run

_OUTCOME = (
    "status",
    "started_at",
    "command",
    "host",
    "commit",
    "job",
    "attempt",
    "examples_per_second",
    "step_seconds",
    "wall_time_seconds",
    "final_metrics",
    "input",
    "time",
)
_LONGEST = 300
_MOST = 200
_SCROLLED = 40


def configuration(runs: Sequence[Run]) -> Markup:
    """The table of settings, one column a run; settings that differ come first and are marked."""
    records = [_flat(run.record) for run in runs]
    keys = list(dict.fromkeys(key for record in records for key in record))[:_MOST]
    if not keys:
        return Markup()
    several = len(runs) > 1
    differing = [key for key in keys if several and not _is_outcome(key) and _differs(records, key)]
    same = [key for key in keys if key not in differing and not _is_outcome(key)]
    outcome = [key for key in keys if _is_outcome(key)]
    rows = [
        *(_row(key, records, style="differs") for key in differing),
        *(_row(key, records) for key in same),
        *(_row(key, records, style="outcome") for key in outcome),
    ]
    columns = [("setting", ""), *((run.name if several else "value", "value") for run in runs)]
    shown = table("Configuration", columns, rows, tall=len(rows) > _SCROLLED)
    if not several:
        return shown
    names = [run_name(run, place) for place, run in enumerate(runs)]
    told = text.plural(len(differing), "setting")
    return parts.settings_compared(len(differing), told, names) + shown


def _row(key: str, records: Sequence[Mapping[str, str]], *, style: str = "") -> Row:
    values = [record.get(key, text.UNKNOWN) for record in records]
    return Row([parts.setting(key, style == "differs"), *values], style)


def _differs(records: Sequence[Mapping[str, str]], key: str) -> bool:
    return len({record.get(key) for record in records}) > 1


def _is_outcome(key: str) -> bool:
    return key.partition(".")[0] in _OUTCOME


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A record's values as text; nested entries get names with dots."""
    found: dict[str, str] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and prefix.count(".") < 2:
            found |= _flat(value, f"{name}.")
        else:
            found[name] = _worded(key, value)
    return found


def _worded(key: str, value: Any) -> str:
    if value is None:
        said = "none"
    elif isinstance(value, str):
        said = value
    elif isinstance(value, bool):
        said = "yes" if value else "no"
    elif key == "command" and isinstance(value, list):
        said = shlex.join(str(word) for word in value)
    else:
        said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= _LONGEST else said[: _LONGEST - 1] + "…"
