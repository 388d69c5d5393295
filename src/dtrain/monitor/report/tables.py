"""Tables of the page: cells in, markup out, each in a box that scrolls sideways where it is too wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from dtrain.monitor.report.markup import parts
from dtrain.monitor.report.names import run_name
from dtrain.monitor.run_data import Run

Column = tuple[str, str]
"""A column's heading, and the style of its cells: "number" (to the right), "long", "wide", "value" or ""."""


class Row(NamedTuple):
    """Cells, each text or markup, the style of the row, and the number of the run that it is about."""

    cells: Sequence[str]
    style: str = ""
    run: int | None = None


def numbers(*headings: str) -> list[Column]:
    """Columns of numbers."""
    return [(heading, "number") for heading in headings]


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    tall: bool = False,
    runs: Sequence[Run] = (),
) -> Markup:
    """A table.

    Args:
        caption: what it is about, for those who do not see what stands around it.
        columns: of each row.
        rows: the first cell of each is its heading.
        tall: whether it scrolls upright, too, since it may have many rows.
        runs: those of the page, where each row is about one. Of several, a row begins with the run's name,
            and the page's legend hides it.
    """
    if len(runs) > 1:
        columns = [("run", ""), *columns]
        rows = [row._replace(cells=[run_name(runs[row.run or 0], row.run or 0), *row.cells]) for row in rows]
    elif runs:
        rows = [row._replace(run=None) for row in rows]
    return parts.table(caption, columns, rows, tall)
