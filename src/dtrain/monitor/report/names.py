"""The name of a run with a sample of its curve, and its state with a sign, as several sections show them.

It lays out no section.
"""

from __future__ import annotations

from markupsafe import Markup

from dtrain.monitor.report.charts import swatch
from dtrain.monitor.report.markup import parts
from dtrain.monitor.run_data import Run, State

_SIGNS: dict[State, str] = {"finished": "✓", "failed": "✕", "running": "▶", "left": "■", "unknown": "?"}


def run_name(run: Run, place: int) -> Markup:
    """A run's name after a sample of its curve."""
    return parts.key(swatch(place), run.name)


def state_badge(run: Run) -> Markup:
    """A run's state in words, with a sign, so that it can be read without its colour."""
    return parts.badge(run.state, _SIGNS[run.state], run.state_text)
