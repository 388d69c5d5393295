"""Parses a run's event file, `events.jsonl`, one JSON object a line, and reports lines that it cannot parse.

It neither writes the file (`event_log.py` does) nor knows what the events mean (`run_events.py` does).
"""

from __future__ import annotations

import json
import math
from typing import Any

NAME = "events.jsonl"

VERSIONS = (0, 1)
"""The formats of a run directory that this dtrain reads; 0 is the format without an event file."""

_SHOWN = 5
_TOGETHER = 500


def versions() -> str:
    """The known formats, for a message."""
    return " and ".join(map(str, VERSIONS))


def is_known_version(version: object) -> bool:
    """Whether this dtrain reads a format. `True` and 1.0 are no versions."""
    return type(version) is int and version in VERSIONS


def parse_events(content: bytes, *, running: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """The events of a file, in its order.

    Args:
        content: the bytes of the file.
        running: whether a process still writes the file, so that an incomplete last line is no problem.

    Returns:
        The events, each a dictionary with a text `kind` and a finite number `time`, all else unchecked; and
        one sentence for each problem. A file of an unknown format gives no events and one problem.
    """
    lines = content.split(b"\n")
    last = lines.pop()
    events: list[dict[str, Any]] = []
    bad: list[int] = []
    begins: set[int] = set()
    for start in range(0, len(lines), _TOGETHER):
        part = lines[start : start + _TOGETHER]
        for number, event in enumerate(_parsed(part), start=start):
            if event is not None:
                events.append(event)
                if event["kind"] == "begin":
                    begins.add(number + 1)
            elif lines[number].strip():
                bad.append(number + 1)
    # A writer that was killed may have left a complete object without a newline: that is an event.
    event = _event(last) if last else None
    if event is not None:
        events.append(event)
    for each in events:
        if each["kind"] == "begin" and not is_known_version(each.get("version", 0)):
            said = f"{NAME} has format version {each.get('version')!r}; this dtrain reads {versions()}."
            return [], [said]
    # An incomplete line before a `begin` is no damage: an attempt died while writing it.
    bad = [number for number in bad if number + 1 not in begins]
    torn = bool(last.strip()) and event is None
    return events, lines_left_out(NAME, bad, torn=torn and not running)


def lines_left_out(file: str, bad: list[int], *, torn: bool) -> list[str]:
    """Sentences about the lines of a file that could not be read.

    Args:
        file: the file's name.
        bad: the numbers of the unreadable lines, from 1.
        torn: whether also the last line is incomplete, as after a crash.
    """
    found = []
    if bad:
        which = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
        found.append(f"{file}: {len(bad)} of its lines cannot be read and were left out ({which}).")
    if torn:
        found.append(f"{file}: its last line is torn and was left out.")
    return found


def _parsed(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """The event of each line, or None. Lines are parsed in one call if possible, which halves the time."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) != len(lines):
        return [_event(line) for line in lines]
    return [_checked(event) for event in found]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return _checked(json.loads(line))
    except (ValueError, RecursionError):  # also what is not UTF-8
        return None


def _checked(event: object) -> dict[str, Any] | None:
    """Return `event` if it is an event, else None."""
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event if finite(event.get("time")) is not None else None


def finite(value: object) -> float | None:
    """A number from JSON as a float, if it is finite; None for anything else, including null and true."""
    if type(value) is float:
        return value if value - value == 0.0 else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
