"""What a run's `metrics.csv` says: one line an epoch, as Keras' CSVLogger writes them.

It reads the lines that are whole and tells of the others; it does not write the file.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

_EPOCH = "epoch"
_SHOWN = 5


def read_metrics(path: Path) -> tuple[dict[int, dict[str, float | None]], bool, list[str]]:
    """The values of each epoch.

    Args:
        path: the file.

    Returns:
        For each epoch, from 0, its values by name, None for NaN; the later of two lines on one epoch counts.
        Whether the last line is torn, as it may be while it is written. One sentence on all else that could
        not be read, if there is something.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        return {}, False, [f"metrics.csv cannot be read: {error.strerror or error}."]
    lines = content.decode("utf-8-sig", errors="replace").splitlines()
    if not lines:
        return {}, False, ["metrics.csv is empty."]
    names = _cells(lines[0]) or []
    if _EPOCH not in names:
        return {}, False, ["metrics.csv has no column 'epoch' in its first line, and was left out."]
    found: dict[int, dict[str, float | None]] = {}
    bad = []
    for number, line in enumerate(lines[1:], start=2):
        epoch = _values(names, line)
        if epoch is not None:
            found[epoch[0]] = epoch[1]
        elif line.strip():
            bad.append(number)
    torn = bool(bad) and bad[-1] == len(lines) and not content.endswith((b"\n", b"\r"))
    if torn:
        bad.pop()
    return found, torn, [_told(bad)] if bad else []


def _told(bad: list[int]) -> str:
    which = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
    return f"metrics.csv: {len(bad)} of its lines cannot be read and were left out ({which})."


def _cells(line: str) -> list[str] | None:
    try:
        return [cell.strip() for cell in next(csv.reader([line]), [])]
    except csv.Error:
        return None


def _values(names: list[str], line: str) -> tuple[int, dict[str, float | None]] | None:
    """The epoch of a line and its values; None for a line that is not whole."""
    cells = _cells(line)
    if cells is None or len(cells) != len(names):
        return None
    row = dict(zip(names, cells, strict=True))
    epoch = _number(row.pop(_EPOCH))
    if epoch is None or epoch < 0 or epoch != int(epoch):
        return None
    # A cell that holds no number, such as NA or an array, is no value of this epoch. NaN is one.
    return int(epoch), {name: _number(cell) for name, cell in row.items() if name and _is_number(cell)}


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str) -> float | None:
    value = float(cell) if _is_number(cell) else math.nan
    return value if math.isfinite(value) else None
