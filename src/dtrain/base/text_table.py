"""Formats a table as text for a terminal, with long cells wrapped, or as Markdown. It makes no content."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

# Of a box, only the rule below the heads is drawn: the third of the eight lines.
_RULE = "    \n    \n--  \n    \n    \n    \n    \n    \n"

_LONGEST = 1000  # characters of a line that is not wrapped


def lines_of(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    right: Collection[int] = (),
    wrapped: Collection[int] = (),
    apart: bool = False,
) -> list[str]:
    """The table's lines, with a rule below the heads.

    Args:
        heads: the heads of the columns.
        rows: the cells of each row.
        width: the characters of a line, at most; without wrapped columns a line is as long as its cells.
        right: the indices of the right-aligned columns.
        wrapped: the indices of the columns whose cells may take several lines; other columns are as wide as
            their longest cell.
        apart: whether an empty line divides the rows.
    """
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    box = Box(_RULE, ascii=True)
    table = Table(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=int(apart))
    for column, head in enumerate(heads):
        table.add_column(
            Text(head), justify="right" if column in right else "left", no_wrap=column not in wrapped
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=width if wrapped else _LONGEST, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def markdown_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; all columns but the first are right-aligned."""

    def line(cells: Sequence[str]) -> str:
        filled = [*cells, *[""] * (len(heads) - len(cells))]
        return f"| {' | '.join(cell.replace('|', '/') for cell in filled)} |"

    aligned = f"|{'|'.join(['---', *['---:'] * (len(heads) - 1)])}|"
    return "\n".join([line(heads), aligned, *map(line, rows)])
