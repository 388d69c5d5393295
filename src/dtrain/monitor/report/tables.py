"""Tables of the page: cells in, markup out, each in a box that scrolls sideways where it is too wide.

It knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dtrain.monitor.report.markup import parts


@dataclass(frozen=True)
class Cell:
    """A cell with a style; one without is its text, or markup, alone."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Row:
    """Cells, the style of the row, and the run that it is about where the page's legend can hide it."""

    cells: Sequence[str | Cell]
    style: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Column:
    """A column's heading, and whether it holds numbers, which stand to the right."""

    name: str
    numbers: bool = False
    style: str = ""

    def classes(self, more: str = "") -> str:
        """The styles of a cell of this column."""
        return " ".join(filter(None, ("number" if self.numbers else "", self.style, more)))


def table(caption: str, columns: Sequence[Column], rows: Sequence[Row], *, tall: bool = False) -> Markup:
    """A table.

    Args:
        caption: what it is about, for those who do not see what stands around it.
        columns: of each row.
        rows: the first cell of each is its heading.
        tall: whether it scrolls upright, too, since it may have many rows.
    """
    return parts.table(caption, columns, [(row, _styled(row, columns)) for row in rows], tall)


def _styled(row: Row, columns: Sequence[Column]) -> list[tuple[str, str]]:
    """The classes and the content of each cell."""
    cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row.cells]
    return [(column.classes(cell.style), cell.text) for cell, column in zip(cells, columns, strict=True)]
