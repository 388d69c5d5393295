"""Formats words and numbers for the page: rounded, with units.

It does not escape text; `markup` does.
"""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

from markupsafe import Markup

from dtrain.base.plain_text import without_controls

UNKNOWN = "\N{EN DASH}"
"""The text for a missing value."""


def clean(text: str) -> str:
    """Remove control characters and lone surrogates, which file names and JSON can contain, from text."""
    return without_controls(text)


def cut(text: str, most: int = 80) -> str:
    """A text cut to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def embed(value: Any) -> Markup:
    """JSON for a script element, with characters escaped that could end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def number(value: float | None) -> str:
    """A number in about four significant digits; whole numbers below a million in full."""
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
    """A whole number with thousands separators."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def position(place: int | None) -> str:
    """A position that counts from 0, shown as counting from 1."""
    return count(None if place is None else place + 1)


def moment(time: float, *, zone: bool = False) -> str:
    """A Unix time as date and time in the local time zone."""
    try:
        local = datetime.datetime.fromtimestamp(time).astimezone()
    except (OverflowError, OSError, ValueError):
        return UNKNOWN
    return local.isoformat(sep=" ", timespec="seconds") if zone else f"{local:%Y-%m-%d %H:%M:%S}"


def seconds(value: float | None) -> str:
    """A duration in seconds, shown in a unit from microseconds to hours."""
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
    """A share from 0 to 1, in percent."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    if 1e-5 <= share < 9.5e-4:  # the ticks of an axis differ, and what is not nothing is not shown as 0.0%
        return f"{100 * share:.2g}%"
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def size(amount: int) -> str:
    """A number of bytes, in MB or kB."""
    return f"{amount / 1e6:.1f} MB" if amount >= 1e6 else f"{max(amount / 1e3, 1):.0f} kB"
