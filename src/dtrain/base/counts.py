"""Parses and checks whole numbers that others have written; Python's `int` refuses thousands of digits."""

from __future__ import annotations

MOST = 10**15
"""The highest number that any option, variable or file of dtrain may have, where nothing lower is set."""


MOST_SECONDS = 1e9
"""The longest time that an option or a variable may set; the system cannot wait for much longer."""


def parse_count(text: str, most: int = MOST) -> int | None:
    """The whole number from 0 to `most` in a text of ASCII digits; None if the text is anything else."""
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if number <= most else None


def is_count(value: object) -> bool:
    """Whether a value of JSON is a whole number from 0 that a size in bytes can be."""
    return type(value) is int and 0 <= value < 1 << 63
