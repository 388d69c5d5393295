"""Tables of the page: cells in, HTML out, each in a box that scrolls sideways where it is too wide.

It knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtrain.monitor.report import text


@dataclass(frozen=True)
class Cell:
    """A cell that is more than text: HTML that is safe already, or text with a style."""

    text: str = ""
    html: str = ""
    style: str = ""

    def render(self) -> str:
        """What stands in the cell."""
        return self.html or text.escape(self.text)


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
    style: str = field(default="")


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    tall: bool = False,
    show_caption: bool = False,
) -> str:
    """A table.

    Args:
        caption: what it is about, for those who do not see what stands around it.
        columns: of each row.
        rows: the first cell of each is its heading.
        tall: whether it scrolls upright, too, since it may have many rows.
        show_caption: whether all see the caption.
    """
    head = "".join(f'<th scope="col"{_style(column)}>{text.escape(column.name)}</th>' for column in columns)
    body = "".join(_row(row, columns) for row in rows)
    hidden = "" if show_caption else ' class="hidden"'
    return (
        f'<div class="scroll{" tall" if tall else ""}" tabindex="0" role="region" '
        f'aria-label="{text.escape(caption)}"><table>'
        f"<caption{hidden}>{text.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Row, columns: Sequence[Column]) -> str:
    cells = []
    for place, (cell, column) in enumerate(zip(row.cells, columns, strict=True)):
        found = cell if isinstance(cell, Cell) else Cell(cell)
        tag = 'th scope="row"' if place == 0 else "td"
        cells.append(f"<{tag}{_style(column, found.style)}>{found.render()}</{tag.split()[0]}>")
    run = "" if row.run is None else f' data-run="{row.run}"'
    style = f' class="{row.style}"' if row.style else ""
    return f"<tr{style}{run}>{''.join(cells)}</tr>"


def _style(column: Column, more: str = "") -> str:
    names = [name for name in ("number" if column.numbers else "", column.style, more) if name]
    return f' class="{" ".join(names)}"' if names else ""
