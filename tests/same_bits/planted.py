"""Shows that the comparison finds changed numbers: it plants some, one by one, in copies of the package."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.contract.harness import ROOT

_FILE = Path(__file__).with_name("planted.toml")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A change of one place in the package.

    Attributes:
        what: it changes, for readers.
        file: below `src/dtrain`.
        old, new: the text that is there, once, and what takes its place.
        cases: those of the short form that are run, "strategy/program" or its beginning.
    """

    what: str
    file: str
    old: str
    new: str
    cases: str

    def plant(self, tree: Path) -> None:
        """Makes the change in a tree.

        Raises:
            SystemExit: the text is not there, or more than once.
        """
        file = tree / "src" / "dtrain" / self.file
        text = file.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{_FILE.name}: {self.file} has {text.count(self.old)} times, not once: {self.old!r}"
            )
        file.write_text(text.replace(self.old, self.new))


def read_planted(file: Path = _FILE) -> list[Planted]:
    """The list of planted changes."""
    return [Planted(**entry) for entry in tomllib.loads(file.read_text())["planted"]]


def not_found(first_difference: Callable[[str, Path], str]) -> Iterator[str]:
    """Plants each change, prints which case finds it, and yields those that none does.

    Args:
        first_difference: takes cases and a tree, and says what differs first there from this tree's numbers,
            or "".
    """
    for planted in read_planted():
        tree = Path(tempfile.mkdtemp(prefix="same-bits-"))
        try:
            shutil.copytree(ROOT / "src", tree / "src")
            planted.plant(tree)
            found = first_difference(planted.cases, tree)
        finally:
            shutil.rmtree(tree, ignore_errors=True)
        print(f"{planted.what}: {found or 'NOT FOUND'}", flush=True)
        if not found:
            yield planted.what
