"""What the guide to fault tolerance tells a reader to write works, and what it cites is there."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "fault_tolerance.md"
SECTION = "## When processes die"  # of the README

TEST_FILE = re.compile(r"\.\./(tests/[\w/]+\.py)")
TEST_NAME = re.compile(r"`(test_\w+)`(?!\])")


def readme_section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(SECTION) == 1
    return text.partition(SECTION)[2].partition("\n## ")[0]


def programs() -> list[tuple[str, str]]:
    texts = {"guide": GUIDE.read_text(encoding="utf-8"), "README": readme_section()}
    found = []
    for name, text in texts.items():
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        found += [(f"{name}-{number}", block) for number, block in enumerate(blocks)]
    return found


PROGRAMS = programs()


@pytest.fixture(autouse=True)
def generators_are_left_alone() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    tf.random.set_seed(None)


def test_there_are_programs() -> None:
    assert {name.partition("-")[0] for name, _ in PROGRAMS} == {"guide", "README"}
    assert len(PROGRAMS) >= 6


@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_a_program_of_the_guide_runs_as_it_stands(
    name: str, program: str, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    environment.chdir(tmp_path)
    if name.startswith("README"):
        # As a user has it: in a process in which nothing of dtrain's has been used before.
        (tmp_path / "train.py").write_text(program)
        subprocess.run([sys.executable, "train.py"], timeout=280, check=True)
    else:
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
    # A program that trains has trained to its end: its checkpoints are deleted.
    assert not list(tmp_path.glob("backup*/**/COMMITTED.json"))


def test_every_test_that_the_guide_cites_is_there() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    files = {ROOT / path for path in TEST_FILE.findall(text)}
    assert len(files) > 8
    assert not [path for path in files if not path.is_file()]
    names = set(TEST_NAME.findall(text))
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in files), re.MULTILINE))
    assert names and names <= defined, names - defined


def test_every_file_that_the_guide_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!http|#)([^)#]+)", GUIDE.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (GUIDE.parent / link).exists()]
