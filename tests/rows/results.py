"""What held in each row: read from logs, kept in `results.json`, shown as a table in docs/installation.md."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from dataclasses import dataclass, field

from .environments import HERE, ROOT, rows

FILE = HERE / "results.json"
PAGE = ROOT / "docs" / "installation.md"
COLUMNS = {
    "names": "names",
    "checkpoints": "checkpoints",
    "killed worker": "a worker killed",
    "killed server's worker": "a server's worker killed",
    "mirrored": "`mirrored`",
    "multi_worker": "`multi_worker`",
    "central_storage": "`central_storage`",
    "parameter_server": "`parameter_server`",
}
_BEGIN, _END = "<!-- made by: make test-matrix -->\n\n", "\n<!-- end -->"
_PROGRAMS = re.compile(r"(\d+) of (\d+) programs hold")
# pytest's last line; with -v, or PYTEST_ADDOPTS=-v, it stands between equals signs.
_TESTS = re.compile(r"^(?:=+ )?(?:\d+ \w+, )*\d+ \w+.* in [\d.]+s(?: \([\d:]+\))?(?: =+)?$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """How many tests or programs ran in a part of a row, and how many of them held; none: it did not end."""

    held: int
    ran: int
    date: str = ""

    @property
    def holds(self) -> bool:
        return 0 < self.held == self.ran

    def __str__(self) -> str:
        text = f"{self.held} of {self.ran}" if self.ran else "did not end"
        return text if self.holds else f"**{text}**"


@dataclass
class Result:
    """What is known of one row; `refused` says why dtrain refuses its versions, where nothing was run."""

    tensorflow: str
    keras: str
    python: str
    may_fail: bool = False
    refused: str = ""
    parts: dict[str, Cell] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not self.refused and all(cell.holds for cell in self.parts.values())


def read(log: str) -> Cell:
    """What the output of pytest or of the contract's harness says at its end."""
    today = datetime.date.today().isoformat()
    if found := _PROGRAMS.findall(log):
        held, ran = map(int, found[-1])
        return Cell(held, ran, today)
    if not (lines := _TESTS.findall(log)):
        return Cell(0, 0, today)
    counts = {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    held = counts.get("passed", 0)
    return Cell(held, held + counts.get("failed", 0) + counts.get("error", 0), today)


def load() -> dict[str, Result]:
    """What `results.json` has, by row."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: Result(**row | {"parts": {part: Cell(**cell) for part, cell in row["parts"].items()}})
        for name, row in found.items()
    }


def write(found: dict[str, Result]) -> None:
    """Puts new cells into `results.json` and the table of the page; a row of other versions is replaced."""
    kept = load()
    for name, result in found.items():
        before = kept.get(name)
        same = before and (before.tensorflow, before.keras) == (result.tensorflow, result.keras)
        if before and same and not result.refused:
            result = dataclasses.replace(result, parts=before.parts | result.parts)
        kept[name] = result
    ordered = {name: dataclasses.asdict(kept[name]) for name in rows() if name in kept}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def table(found: dict[str, Result]) -> str:
    """The table: a line for each row, a column for each part; below it why versions are refused."""
    lines = [["TensorFlow", "Keras", *COLUMNS.values()], ["---"] * (2 + len(COLUMNS))]
    refused = []
    for result in found.values():
        cells = [str(result.parts[part]) if part in result.parts else "not run" for part in COLUMNS]
        if result.refused:
            cells[0] = "refused"
            both = f"TensorFlow {result.tensorflow} with Keras {result.keras}"
            refused.append(f"\n{both}: `{result.refused}`\n")
        note = ", may fail" if result.may_fail else ""
        versions = [re.sub(r"\.dev\d{8,}$", ".dev", each) for each in (result.tensorflow, result.keras)]
        lines.append([versions[0] + note, versions[1], *cells])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + "".join(refused)


def page(text: str) -> str:
    """The text of the page with the table of `results.json`."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table(load())}{_END}{after}"
