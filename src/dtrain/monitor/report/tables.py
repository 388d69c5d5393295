"""Makes the page's tables; a table that is too wide scrolls sideways. It does not choose what they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from dtrain.monitor.report.markup import parts
from dtrain.monitor.report.names import run_name
from dtrain.monitor.run_data import Run

Column = tuple[str, str]
"""A column's heading, and its cells' style: "number" (aligned right), "long", "wide", "value" or ""."""


class Row(NamedTuple):
    """Cells, each text or markup; the style of the row; and the number of the run that the row is about."""

    cells: Sequence[str]
    style: str = ""
    run: int | None = None


def numbers(*headings: str) -> list[Column]:
    """Make columns of numbers."""
    return [(heading, "number") for heading in headings]


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    tall: bool = False,
    runs: Sequence[Run] = (),
) -> Markup:
    """Make a table.

    Args:
        caption: the subject of the table, for screen readers.
        columns: the columns.
        rows: the rows; the first cell of each is its heading.
        tall: whether the table also scrolls vertically, because it may have many rows.
        runs: the page's runs, if each row is about one of them. If there are several, each row begins with
            the run's name, and the page's legend can hide it.
    """
    if len(runs) > 1:
        columns = [("run", ""), *columns]
        rows = [row._replace(cells=[run_name(runs[row.run or 0], row.run or 0), *row.cells]) for row in rows]
    elif runs:
        rows = [row._replace(run=None) for row in rows]
    return parts.table(caption, columns, rows, tall)
