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
from dtrain.monitor.report.markup import sections
from dtrain.monitor.run_data import RunData

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
    "quorum",
    "time",
    "goodput",
)
_LONGEST = 300
_MOST = 200


def configuration(runs: Sequence[RunData], names: Sequence[Markup]) -> Markup:
    """The table of settings, one column a run; settings that differ come first and are marked."""
    records = [_flat(run.record) for run in runs]
    rows: list[dict[str, Any]] = []
    for key in list(dict.fromkeys(key for record in records for key in record))[:_MOST]:
        values = [record.get(key, text.UNKNOWN) for record in records]
        style = "outcome" if key.partition(".")[0] in _OUTCOME else "differs" if len(set(values)) > 1 else ""
        rows.append({"key": key, "values": values, "style": style})
    rows.sort(key=lambda row: ("differs", "", "outcome").index(row["style"]))
    differing = sum(row["style"] == "differs" for row in rows)
    return sections.configuration(runs, names, rows, differing) if rows else Markup()


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A record's values as text; nested entries get names with dots."""
    texts: dict[str, str] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and prefix.count(".") < 2:
            texts |= _flat(value, f"{name}.")
        else:
            texts[name] = _worded(key, value)
    return texts


def _worded(key: str, value: Any) -> str:
    if value is None:
        shown = "none"
    elif isinstance(value, str):
        shown = value
    elif isinstance(value, bool):
        shown = "yes" if value else "no"
    elif key == "command" and isinstance(value, list):
        shown = shlex.join(str(word) for word in value)
    else:
        shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
