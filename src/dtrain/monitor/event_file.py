"""What a run's event file says: `events.jsonl`, one JSON object a line, read as far as it can be read.

It parses and counts what it could not parse. It neither writes the file nor knows what its events mean.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSIONS = (0, 1)
"""The formats of a run directory that this dtrain reads; 0 is that of runs without an event file."""

_SHOWN = 5
_TOGETHER = 500


@dataclass(frozen=True)
class EventProblems:
    """What could not be read of an event file.

    Attributes:
        lines: the numbers, from 1, of the lines that hold no event.
        torn_end: whether the last line lacks its end, as it does while it is written and after a crash.
        version: the format that the file says it has, where it is one that is not read; else None.
        unreadable: why nothing of the file could be read; empty if it could.
    """

    lines: tuple[int, ...] = ()
    torn_end: bool = False
    version: Any = None
    unreadable: str = ""

    def messages(self, *, running: bool = False) -> list[str]:
        """One sentence a problem. The torn end of a run that is still written is none."""
        if self.unreadable:
            return [f"events.jsonl cannot be read: {self.unreadable}."]
        if self.version is not None:
            return [f"events.jsonl has format version {self.version!r}; this dtrain reads {versions()}."]
        found = []
        if self.lines:
            count = len(self.lines)
            which = ", ".join(map(str, self.lines[:_SHOWN])) + (", ..." if count > _SHOWN else "")
            found.append(f"events.jsonl: {count} of its lines cannot be read and were left out ({which}).")
        if self.torn_end and not running:
            found.append("events.jsonl: its last line is torn and was left out.")
        return found


def versions() -> str:
    """The formats that are read, in words."""
    return " and ".join(map(str, VERSIONS))


def is_known_version(version: object) -> bool:
    """Whether a format is one that is read. `True` and 1.0 are no versions."""
    return type(version) is int and version in VERSIONS


def read_events(path: Path) -> tuple[list[dict[str, Any]], EventProblems]:
    """The events of a file, in its order.

    Args:
        path: the file.

    Returns:
        Each event as a dictionary with a text `kind` and a finite number `time`, all else unchecked; and what
        could not be read. A file of a format that is not known gives no events.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        return [], EventProblems(unreadable=error.strerror or str(error))
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
    # A writer that was killed may have left a whole object and no end of line: that is an event.
    event = _event(last) if last else None
    if event is not None:
        events.append(event)
    for each in events:
        if each["kind"] == "begin" and not is_known_version(each.get("version", 0)):
            return [], EventProblems(version=each.get("version"))
    # A line that an attempt left torn when it died is not damage: the next attempt began behind it.
    bad = [number for number in bad if number + 1 not in begins]
    return events, EventProblems(lines=tuple(bad), torn_end=bool(last.strip()) and event is None)


def _parsed(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """What each line holds. Whole lines are parsed together, which takes half the time."""
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
    """What was parsed, if it is an event."""
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event if finite(event.get("time")) is not None else None


def finite(value: object) -> float | None:
    """A number as it stands in JSON, if it is finite; None for all else, null and true among them."""
    if type(value) is float:
        return value if value - value == 0.0 else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
