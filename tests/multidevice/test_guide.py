"""What the guide tells a reader to write works, and the tests that it cites are there.

The rule for blocks is in `tests/guide.py`.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import guide
import small_archives

README = guide.ROOT / "README.md"
FAULTS = guide.DOCS / "fault_tolerance.md"

TEST_FILE = re.compile(r"\.\./(tests/[\w/]+\.py)")
TEST_NAME = re.compile(r"`(test_\w+)`(?!\])")

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in guide.pages()}
ENGINES = {"ray", "tune_on_ray.py"}  # pages and files that need a cluster: other tests run them
WITH_PROGRAMS = [name for name, text in TEXTS.items() if guide.programs(text)]
# Pages whose programs train for longer than ten seconds.
LONG = {"batches", "best_practices", "coming_from", "index", "launching", "monitoring", "notebooks"}
LONG |= {"precision", "questions", "tasks"}
PAGES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in WITH_PROGRAMS]
FILES = [
    (name, block.title)
    for name, text in TEXTS.items()
    for block in guide.files(text)
    if not {name, block.title} & ENGINES
]


@pytest.fixture(autouse=True)
def what_is_global_is_left_alone() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
    random.setstate(states[0])
    np.random.set_state(states[1])
    tf.random.set_seed(None)


@pytest.fixture
def folder(tmp_path: Path, environment: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with a small archive of CIFAR-10 where data is looked for."""
    environment.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    small_archives.write_cifar10(tmp_path / "data")
    environment.setenv("DTRAIN_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


def test_there_are_programs() -> None:
    assert len(WITH_PROGRAMS) >= 12
    assert {*WITH_PROGRAMS} >= LONG
    assert sum(len(guide.programs(text)) for text in TEXTS.values()) >= 40
    assert FILES


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run_as_they_stand(name: str, folder: Path) -> None:
    namespace = {"__name__": "__main__"}
    for block in guide.programs(TEXTS[name]):
        # Empty lines before it, so that a traceback has the page's own lines.
        exec(compile("\n" * (block.line - 1) + block.text, f"docs/{name}.md", "exec"), namespace)
    # A program that trains has trained to its end: its checkpoints are deleted.
    assert not list(folder.glob("backup*/**/COMMITTED.json"))


def run_command(command: list[str]) -> None:
    """A command of a page, as words, in the current folder; it must end well."""
    start = next(i for i, word in enumerate(command) if "=" not in word)
    variables = dict(word.split("=", 1) for word in command[:start])
    python = [sys.executable, "-m", "dtrain"] if command[start] == "dtrain" else [sys.executable]
    done = subprocess.run(
        [*python, *command[start + 1 :]],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | variables,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.parametrize(("name", "title"), FILES, ids=[f"{name}-{title}" for name, title in FILES])
def test_a_program_of_a_page_runs_by_its_commands(name: str, title: str, folder: Path) -> None:
    run_file_by_its_commands(TEXTS[name], title, folder)


@pytest.mark.long
def test_the_quickstart_of_the_readme_runs_by_its_commands(folder: Path) -> None:
    text = README.read_text(encoding="utf-8")
    assert not guide.programs(text), "a block without a title is not run"
    (block,) = guide.files(text)
    run_file_by_its_commands(text, block.title, folder)
    # It has trained to its end: its checkpoints are deleted.
    assert not list(folder.glob("backup*/**/COMMITTED.json"))


def run_file_by_its_commands(text: str, title: str, folder: Path) -> None:
    """Run a file of a page by each command of the page that names it."""
    for block in guide.files(text):
        (folder / block.title).write_text(block.text, encoding="utf-8")
    naming = [command for command in guide.commands(text) if title in command]
    assert naming, f"no command runs {title}"
    for command in naming:
        run_command(command)


@pytest.mark.soak("test_docs.py asks for the options, test_recipes.py for what recipes learn")
@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("tasks", "dtrain train cifar10 --strategy mirrored"),
        ("batches", "dtrain train digits --scaling linear"),
    ],
    ids=["tasks", "batches"],
)
def test_a_recipe_of_a_page_runs_by_its_command(name: str, beginning: str, folder: Path) -> None:
    (command,) = (c for c in guide.commands(TEXTS[name]) if " ".join(c).startswith(beginning))
    run_command(command)
    assert list(folder.glob("runs/*/model.keras"))


def test_every_test_that_the_guide_cites_is_there() -> None:
    text = TEXTS["fault_tolerance"]
    files = {guide.ROOT / path for path in TEST_FILE.findall(text)}
    assert len(files) > 8
    assert not [path for path in files if not path.is_file()]
    names = set(TEST_NAME.findall(text))
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in files), re.MULTILINE))
    assert names and names <= defined, names - defined
