"""Formats a table as text for a terminal, with long cells wrapped, or as Markdown. It makes no content."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_GAP = "  "


def lines_of(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    right: Sequence[int] = (),
    wrapped: Sequence[int] = (),
) -> list[str]:
    """The table's lines, with a rule below the heads.

    Args:
        heads: the heads of the columns.
        rows: the cells of each row. In a row with fewer cells than columns, the last cell spans the rest.
        width: the characters of a line, unless the wrapped columns cannot be made so narrow.
        right: the indices of the right-aligned columns.
        wrapped: the indices of the columns whose cells may take several lines; other columns are as wide as
            their longest cell.
    """
    whole = [row for row in rows if len(row) == len(heads)]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *whole, strict=True)]
    _narrow(widths, heads, wrapped, width)
    rule = ["-" * each for each in widths]
    found: list[str] = []
    for row in (heads, rule, *rows):
        found += _row(row, widths, set(right))
    return found


def markdown_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; all columns but the first are right-aligned."""

    def line(cells: Sequence[str]) -> str:
        filled = [*cells, *[""] * (len(heads) - len(cells))]
        return f"| {' | '.join(cell.replace('|', '/') for cell in filled)} |"

    aligned = f"|{'|'.join(['---', *['---:'] * (len(heads) - 1)])}|"
    return "\n".join([line(heads), aligned, *map(line, rows)])


def _narrow(widths: list[int], heads: Sequence[str], wrapped: Sequence[int], width: int) -> None:
    """Narrow the widest wrapped column, repeatedly, until the line is short enough."""
    least = {column: max(map(len, heads[column].split())) for column in wrapped}
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        wide = [column for column in wrapped if widths[column] > max(least[column], 8)]
        if not wide:
            return
        widths[max(wide, key=lambda column: widths[column])] -= 1


def _row(cells: Sequence[str], widths: Sequence[int], right: set[int]) -> list[str]:
    """A row as lines of text, as many as its longest cell needs."""
    own = list(widths[: len(cells)])
    own[-1] = sum(widths[len(cells) - 1 :]) + len(_GAP) * (len(widths) - len(cells))
    parts = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
        for cell, width in zip(cells, own, strict=True)
    ]
    found = []
    for number in range(max(map(len, parts))):
        line = [lines[number] if number < len(lines) else "" for lines in parts]
        set_ = [
            cell.rjust(width) if column in right and len(cells) == len(widths) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, own, strict=True))
        ]
        found.append(_GAP.join(set_).rstrip())
    return found
