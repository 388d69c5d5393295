"""The count of lines: what is code, what documents, what is empty."""

from tests.count import ROOT, Lines, by_folder, count

_SOURCE = '''"""A module.

Two sentences."""

import os  # code, for all of its comment

# a comment
LIMIT = 3
"""What it is."""


def text():
    """One line."""
    return """of two

    lines and an empty one"""
'''


def test_each_line_is_counted_once():
    found = count(_SOURCE)
    assert found == Lines(files=1, code=6, documentation=5, empty=5)
    assert sum(found[1:]) == len(_SOURCE.splitlines())


def test_the_package_is_counted_whole():
    found = by_folder(ROOT / "src" / "dtrain")
    files = list((ROOT / "src" / "dtrain").rglob("*.py"))
    assert sum(lines.files for lines in found.values()) == len(files)
    assert sum(sum(lines[1:]) for lines in found.values()) == sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in files
    )
