"""Parses a run's `metrics.csv`: one line an epoch, as Keras' CSVLogger writes it.

It reads the complete lines and reports the others. It does not write the file.
"""

from __future__ import annotations

import csv
import math

from dtrain.monitor.event_file import lines_left_out

_NAME = "metrics.csv"
_EPOCH = "epoch"


def parse_metrics(
    content: bytes, *, running: bool = False
) -> tuple[dict[int, dict[str, float | None]], list[str]]:
    """The values of each epoch.

    Args:
        content: the bytes of the file.
        running: whether a process still writes the file, so that an incomplete last line is no problem.

    Returns:
        For each epoch, from 0, its values by name, None for NaN or infinity; of two lines for one epoch the
        later counts. And one sentence for each problem.
    """
    lines = content.decode("utf-8-sig", errors="replace").splitlines()
    if not lines:
        return {}, [f"{_NAME} is empty."]
    names = _cells(lines[0]) or []
    if _EPOCH not in names:
        return {}, [f"{_NAME} has no column 'epoch' in its first line, and was left out."]
    found: dict[int, dict[str, float | None]] = {}
    bad = []
    for number, line in enumerate(lines[1:], start=2):
        epoch = _values(names, line)
        if epoch is not None:
            found[epoch[0]] = epoch[1]
        elif line.strip():
            bad.append(number)
    torn = bool(bad) and bad[-1] == len(lines) and not content.endswith((b"\n", b"\r"))
    return found, lines_left_out(_NAME, bad[:-1] if torn else bad, torn=torn and not running)


def _cells(line: str) -> list[str] | None:
    try:
        return [cell.strip() for cell in next(csv.reader([line]), [])]
    except csv.Error:
        return None


def _values(names: list[str], line: str) -> tuple[int, dict[str, float | None]] | None:
    """The epoch of a line and its values; None for an incomplete line."""
    cells = _cells(line)
    if cells is None or len(cells) != len(names):
        return None
    # A cell that holds no number, such as NA or an array, is left out. NaN is kept, as None.
    row = {
        name: value for name, cell in zip(names, cells, strict=True) if (value := _number(cell)) is not None
    }
    epoch = row.pop(_EPOCH, math.nan)
    if not math.isfinite(epoch) or epoch < 0 or epoch != int(epoch):
        return None
    return int(epoch), {name: value if math.isfinite(value) else None for name, value in row.items() if name}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
