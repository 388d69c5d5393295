"""Loads the page's HTML templates from `templates/`.

Each value is escaped, unless a template made it. Templates decide how the page looks, and the modules that
call them decide what it shows.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from dtrain.monitor.report import text

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
    "seconds": text.seconds,
    "percent": text.percent,
}


def page(**values: Any) -> str:
    """Render the whole page."""
    return _pages.get_template("page.html").render(values)


parts: Any = _pages.get_template("parts.html").module
"""The macros of `parts.html`, as functions that return markup: tables, legends and other small pieces."""

drawings: Any = _pages.get_template("drawings.html").module
"""The macros of `drawings.html`, as functions that return markup: charts of curves and of bars."""
