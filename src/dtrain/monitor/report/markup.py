"""Loads the page's HTML templates from `templates/`.

Each value is escaped, unless a template made it. Templates decide how the page looks, and the modules that
call them decide what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from dtrain.base.words import counted
from dtrain.monitor.report import text
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import RunData

PARTS = (
    "productive",
    "compute",
    "input",
    "waiting",
    "communication",
    "checkpoint",
    "restore",
    "callbacks",
    "validation",
    "start",
    "tracing",
    "repeated",
    "restart",
    "other",
)
"""The parts of an epoch's time, and the kinds of a run's wall time, in the order in which they are drawn."""

_FOLDER = resources.files(__package__) / "templates"


def source(name: str) -> str:
    """The text of a file in `templates/`, such as the style sheet."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _tight(name: str) -> str:
    """A template without the newlines between its tags, which would show as spaces on the page."""
    return re.sub(r"(?<=[>}])\s*\n\s*(?=[<{])", "", source(name))


def _clean(value: object) -> object:
    """Remove control characters from text; leave markup and other values as they are."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else text.clean(value)


def part_class(name: str) -> str:
    """The CSS class of a part; an unknown part looks like `other`."""
    return f"p-{name}" if name in PARTS else "p-other"


def ordered(parts: Mapping[str, float]) -> list[str]:
    """The names of `parts` in the order of PARTS, unknown ones last."""
    return [name for name in PARTS if name in parts] + sorted(name for name in parts if name not in PARTS)


def _all_of(runs: Sequence[RunData], name: str, fewest: int = 1) -> list[tuple[int, Any]]:
    """All items of a kind, each after the number of its run; without runs of fewer than `fewest` items."""
    by_run = [(place, getattr(run, name)) for place, run in enumerate(runs)]
    return [(place, item) for place, items in by_run if len(items) >= fewest for item in items]


def _communicated(runs: Sequence[RunData]) -> list[tuple[int, Any]]:
    """What replicas communicate in a step of each run, after the number of the run."""
    plans = [(place, run.plan) for place, run in enumerate(runs)]
    return [
        (place, communication)
        for place, plan in plans
        if plan is not None
        for communication in plan.communications
    ]


_pages = Environment(
    loader=FunctionLoader(_tight),
    autoescape=True,
    finalize=_clean,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)
_pages.filters |= {
    "g": lambda value: f"{value:g}",
    "place": lambda value: f"{value:.1f}",
    "number": text.number,
    "count": text.count,
    "position": text.position,
    "moment": text.moment,
    "seconds": text.seconds,
    "percent": text.percent,
    "plural": counted,
    "worded": lambda name: name.replace("_", " "),
    "texts": lambda headings, style="": [(heading, style) for heading in headings],
    "numbers": lambda headings: [(heading, "number") for heading in headings],
    "numbered": lambda items: list(enumerate(items)),
    "all_of": _all_of,
    "communicated": _communicated,
    "thin": thin_list,
    "ordered": ordered,
    "part_class": part_class,
}


def page(**values: Any) -> str:
    """Render the whole page."""
    return _pages.get_template("page.html").render(values)


sections: Any = _pages.get_template("sections.html").module
"""The macros of `sections.html`, as functions that return markup: the sections that consist of tables."""

parts: Any = _pages.get_template("parts.html").module
"""The macros of `parts.html`, as functions that return markup: legends and other small pieces."""

blocks: Any = _pages.get_template("blocks.html").module
"""The macros of `blocks.html`, as functions that return markup: the elements of which the page consists."""

drawings: Any = _pages.get_template("drawings.html").module
"""The macros of `drawings.html`, as functions that return markup: charts of curves and of bars."""
