"""README.md: how long it is, and that what it shows is what the commands of the repository made.

That its quickstart runs is `tests/multidevice/test_guide.py`'s to show, and that its links work on a package
index `tests/multiprocess/test_wheel.py`'s.
"""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

import guide
from dtrain.base.text_table import markdown_of
from dtrain.conformance.corpus import CorpusProgram
from dtrain.conformance.strategy_layouts import DTRAIN, LAYOUTS, STOCK
from dtrain.conformance.verdict_table import as_page
from dtrain.conformance.verdicts import ERROR, SAME, WRONG, Conformance, ProgramVerdict

README = (guide.ROOT / "README.md").read_text(encoding="utf-8")
DATA = json.loads((guide.DOCS / "conformance.json").read_text(encoding="utf-8"))


def run_of(data: dict[str, Any]) -> Conformance:
    verdicts = {
        strategy: {
            side: {name: ProgramVerdict(*verdict) for name, verdict in found.items()}
            for side, found in sides.items()
        }
        for strategy, sides in data["verdicts"].items()
    }
    programs = [CorpusProgram(**each) for each in data["programs"]]
    return Conformance(**{**data, "programs": programs, "verdicts": verdicts})


MEASURED = run_of(DATA)


def test_it_can_be_read_to_its_end() -> None:
    assert len(README.split()) <= 1200


def test_four_lines_are_added_to_an_ordinary_script() -> None:
    (diff,) = (block for block in guide.blocks(README) if block.language == "diff")
    assert len([line for line in diff.text.splitlines() if line.startswith("+") and line != "+"]) == 4


def test_its_table_of_conformance_is_the_measured_one() -> None:
    programs = MEASURED.counted()
    rows = []
    for strategy in MEASURED.verdicts:
        right, wrong, error = (MEASURED.count(strategy, STOCK, each) for each in (SAME, WRONG, ERROR))
        ours = MEASURED.count(strategy, DTRAIN, SAME)
        name, total = LAYOUTS[strategy].class_name.removesuffix("Strategy"), len(programs)
        rows.append([f"`{name}`", f"{right} of {total}", str(wrong), str(error), f"{ours} of {total}"])
    heads = ["strategy", "stock: right", "wrong", "error", "dtrain: right"]
    assert markdown_of(heads, rows) in README
    assert f"runs {len(programs)} short, ordinary programs" in README


def test_the_data_of_conformance_are_those_that_the_command_writes() -> None:
    assert MEASURED.as_data() == DATA


def test_the_page_of_conformance_is_the_measured_one() -> None:
    assert (guide.DOCS / "conformance.md").read_text(encoding="utf-8") == as_page(MEASURED)


@pytest.mark.parametrize("name", re.findall(r"!\[[^\]]+\]\((docs/images/[^)]+)\)", README))
def test_its_pictures_load_nothing_from_elsewhere(name: str) -> None:
    text = (guide.ROOT / name).read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "url(" not in text


def test_it_has_two_pictures() -> None:
    assert len(re.findall(r"!\[[^\]]+\]\(docs/images/[^)]+\)", README)) == 2
