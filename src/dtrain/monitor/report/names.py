"""How a run is named on the page: with the colour, dashes and mark of its curves, and its state with a sign.

Small pieces that several sections share.
"""

from __future__ import annotations

from dtrain.monitor.report import text
from dtrain.monitor.report.charts import swatch
from dtrain.monitor.report.tables import Cell
from dtrain.monitor.run_data import Run, State

_SIGNS: dict[State, str] = {"finished": "✓", "failed": "✕", "running": "▶", "left": "■", "unknown": "?"}


def run_name(run: Run, place: int) -> Cell:
    """A run's name behind a piece of its curve."""
    return Cell(html=f'<span class="key">{swatch(place)}{text.escape(run.name)}</span>')


def state_badge(run: Run) -> str:
    """A run's state in words, with a sign, so that it does not hang on its colour."""
    sign = f'<span aria-hidden="true">{_SIGNS[run.state]}</span>'
    return f'<span class="badge {run.state}">{sign} {text.escape(run.state_text)}</span>'
