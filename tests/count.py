"""Counts the lines of the package: code, documentation and empty lines.

    python -m tests.count            # src/dtrain, a line for each of its folders
    python -m tests.count FOLDER     # another folder, such as tests

A line is code if it has a token that is neither a comment nor a part of a docstring. The string below an
attribute, which documents the attribute, is a docstring too. All other lines that are not empty count as
documentation.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Lines(NamedTuple):
    """The numbers of lines of one file or of several."""

    files: int = 0
    code: int = 0
    documentation: int = 0
    empty: int = 0

    def plus(self, other: Lines) -> Lines:
        return Lines(*(sum(pair) for pair in zip(self, other, strict=True)))


def count(source: str) -> Lines:
    """Count the lines of one file, given its text."""
    documented = set(_of_docstrings(ast.parse(source)))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= documented
    lines = source.splitlines()
    empty = sum(not line.strip() and number not in code for number, line in enumerate(lines, start=1))
    return Lines(1, len(code), len(lines) - len(code) - empty, empty)


def _of_docstrings(tree: ast.AST) -> Iterator[int]:
    """The line numbers of statements that consist of a string only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def by_folder(root: Path) -> dict[str, Lines]:
    """Count the lines of each folder directly below `root`; "." stands for the files of `root` itself."""
    counts: dict[str, Lines] = {}
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root).parts
        name = inner[0] if len(inner) > 1 else "."
        counts[name] = counts.get(name, Lines()).plus(count(path.read_text(encoding="utf-8")))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.count", description="counts lines of Python")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "src" / "dtrain")
    counts = by_folder(parser.parse_args().folder)
    total = Lines()
    for part in counts.values():
        total = total.plus(part)
    print(f"{'folder':<20}{'files':>7}{'code':>8}{'documentation':>15}{'share':>7}{'empty':>7}")
    for name, lines in [*counts.items(), ("all", total)]:
        share = lines.documentation / max(lines.code + lines.documentation, 1)
        print(
            f"{name:<20}{lines.files:>7}{lines.code:>8}{lines.documentation:>15}{share:>7.0%}{lines.empty:>7}"
        )


if __name__ == "__main__":
    main()
