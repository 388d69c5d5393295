"""Words and numbers as the page shows them: rounded, with units.

`markup` escapes and cleans what goes into the page.
"""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

from markupsafe import Markup

from dtrain.plain_text import without_controls

UNKNOWN = "\N{EN DASH}"
"""Stands where there is no value."""


def clean(text: str) -> str:
    """Text without control characters and halves of characters, of which file names and JSON can consist."""
    return without_controls(text)


def cut(text: str, most: int = 80) -> str:
    """A name that is not longer than a heading may be."""
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def embed(value: Any) -> Markup:
    """JSON for a script element, which no text in it can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def number(value: float | None) -> str:
    """A number in at most four or five digits that count."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{value:,.0f}"
    if size >= 1e7 or size < 1e-3:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def count(value: float | None) -> str:
    """A whole number."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def position(place: int | None) -> str:
    """What is counted from 0, as people count it."""
    return count(None if place is None else place + 1)


def moment(time: float) -> datetime.datetime | None:
    """A Unix time in the time zone here; None for what is none."""
    try:
        return datetime.datetime.fromtimestamp(time).astimezone()
    except (OverflowError, OSError, ValueError):
        return None


def seconds(value: float | None) -> str:
    """A time, from microseconds to hours."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0 s"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if value < 999.5 * size:
            return f"{value / size:.3g} {unit}"
    if value < 59.95:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def percent(share: float | None) -> str:
    """A share of 0 to 1 in percent."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def plural(amount: int, noun: str) -> str:
    """A number and its noun."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def size(amount: int) -> str:
    """A number of bytes."""
    return f"{amount / 1e6:.1f} MB" if amount >= 1e6 else f"{max(amount / 1e3, 1):.0f} kB"
