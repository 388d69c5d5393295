"""Parses a run's files of lines, `events.jsonl` and `metrics.csv`, and reports lines that it cannot parse.

It neither writes the files (`event_log.py` and Keras' CSVLogger do) nor knows what the events mean
(`run_events.py` does).
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dtrain.base import safe_files

EVENTS = "events.jsonl"
METRICS = "metrics.csv"

MOST_OF_EVENTS = 512 << 20
"""The largest `events.jsonl` in bytes: lines of three weeks at one a second."""
MOST_OF_METRICS = 32 << 20
"""The largest `metrics.csv` in bytes."""

VERSIONS = (0, 1)
"""The formats of a run directory that this dtrain reads; 0 is the format without an event file."""

_EPOCH = "epoch"
_SHOWN = 5
_MOST_LINES = 2_000_000
_LONGEST_LINE = 16 << 20  # bytes
_MOST_VALUES = 5_000_000  # lists and objects in a file; each takes far more memory than its two characters
_MOST_COLUMNS = 10_000
_LARGEST = 1e300  # beyond it, sums and products of values would be infinite
_HIGHEST_EPOCH = 10**9
_T = TypeVar("_T")


def versions() -> str:
    """The known formats, for a message."""
    return " and ".join(map(str, VERSIONS))


def is_known_version(version: object) -> bool:
    """Whether this dtrain reads a format. `True` and 1.0 are no versions."""
    return type(version) is int and version in VERSIONS


def parse_events(content: bytes, *, running: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """The events of `events.jsonl`, one JSON object a line, in the file's order.

    Args:
        content: the bytes of the file.
        running: whether a process still writes the file, so that an incomplete last line is no problem.

    Returns:
        The events, each a dictionary with a text `kind` and a finite number `time`, all else unchecked; and
        one sentence for each problem. A file of an unknown format gives no events and one problem.
    """
    values = content.count(b"{") + content.count(b"[")
    if values > _MOST_VALUES:
        return [], [f"{EVENTS} has {values} lists and objects, more than {_MOST_VALUES}, and was left out."]
    lines, more = _lines(EVENTS, content)
    events, bad, torn = _parsed(lines, _event)
    begins = {number: event for number, event in events.items() if event["kind"] == "begin"}
    for event in begins.values():
        if not is_known_version(event.get("version", 0)):
            problem = f"{EVENTS} has format version {event.get('version')!r}; this dtrain reads {versions()}."
            return [], [problem]
    # An incomplete line before a `begin` is no damage: an attempt died while writing it.
    bad = [number for number in bad if number + 1 not in begins]
    return list(events.values()), [*more, *_lines_left_out(EVENTS, bad, torn=torn and not running)]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, one after another, as `parse_events` gives them; other lines are left out.

    Raises:
        OSError: the file cannot be read.
    """
    with safe_files.open_to_read(path) as file:
        lines = iter(lambda: file.readline(_LONGEST_LINE), b"")
        for line in itertools.islice(lines, _MOST_LINES):
            if (event := _event(line)) is not None:
                yield event


def parse_metrics(
    content: bytes, *, running: bool = False
) -> tuple[dict[int, dict[str, float | None]], list[str]]:
    """The values of each epoch in `metrics.csv`, one line an epoch.

    Args:
        content: the bytes of the file.
        running: whether a process still writes the file, so that an incomplete last line is no problem.

    Returns:
        For each epoch, from 0, its values by name, None for NaN or infinity; of two lines for one epoch the
        later counts. And one sentence for each problem.
    """
    if not content:
        return {}, [f"{METRICS} is empty."]
    (first, *lines), more = _lines(METRICS, content.removeprefix(b"\xef\xbb\xbf"))
    names = _cells(first)
    if len(names) > _MOST_COLUMNS:
        return {}, [
            f"{METRICS} has {len(names)} columns, and was left out; at most {_MOST_COLUMNS} are read."
        ]
    if _EPOCH not in names:
        return {}, [f"{METRICS} has no column 'epoch' in its first line, and was left out."]
    rows, bad, torn = _parsed(lines, lambda line: _values(names, line))
    left_out = _lines_left_out(METRICS, [1 + n for n in bad], torn=torn and not running)
    return dict(rows.values()), [*more, *left_out]


def _lines(file: str, content: bytes) -> tuple[list[bytes], list[str]]:
    """The first lines of a file, and a sentence if there are more than are read."""
    lines = content.split(b"\n", _MOST_LINES)
    if len(lines) <= _MOST_LINES:
        return lines, []
    return lines[:-1], [f"{file} has more than {_MOST_LINES} lines; the others were left out."]


def _parsed(lines: list[bytes], parse: Callable[[bytes], _T | None]) -> tuple[dict[int, _T], list[int], bool]:
    """Parse lines that were divided at newlines, of which the last one may be incomplete.

    A writer that was killed may have left a complete last line without its newline: that counts.

    Returns:
        What was parsed by the number of the line, from 1; the numbers of other lines that are not empty; and
        whether also the last line, after the last newline, is not empty and could not be parsed.
    """
    items, bad = {}, []
    for number, line in enumerate(lines, start=1):
        item = parse(line) if len(line) <= _LONGEST_LINE else None
        if item is not None:
            items[number] = item
        elif line.strip():
            bad.append(number)
    torn = bad[-1:] == [len(lines)]
    return items, bad[:-1] if torn else bad, torn


def _lines_left_out(file: str, bad: list[int], *, torn: bool) -> list[str]:
    problems = []
    if bad:
        which = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
        problems.append(f"{file}: {len(bad)} of its lines cannot be read and were left out ({which}).")
    if torn:
        problems.append(f"{file}: its last line is torn and was left out.")
    return problems


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = safe_files.parse_json(line)
    except ValueError:  # also what is not UTF-8
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event if finite(event.get("time")) is not None else None


def _cells(line: bytes) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode(errors="replace")]), [])]
    except csv.Error:
        return []


def _values(names: list[str], line: bytes) -> tuple[int, dict[str, float | None]] | None:
    """The epoch of a line and its values; None for an incomplete line."""
    cells = _cells(line)
    if len(cells) != len(names):
        return None
    row: dict[str, float] = {}
    for name, cell in zip(names, cells, strict=True):
        # A cell that holds no number, such as NA or an array, is left out. NaN is kept, as None.
        with contextlib.suppress(ValueError):
            row[name] = float(cell)
    epoch = row.pop(_EPOCH, math.nan)
    if not 0 <= epoch <= _HIGHEST_EPOCH or not epoch.is_integer():
        return None
    return int(epoch), {name: finite(value) for name, value in row.items() if name}


def finite(value: object) -> float | None:
    """A number from JSON as a float; None for anything else, including null, true and what is not finite.

    A number with which sums would overflow counts as infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None
