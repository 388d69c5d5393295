"""The list of skips: what it allows, what it refuses, and that its entries are of use."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests.skips import STATUS, Entry, read

ROOT = Path(__file__).parents[2]

LISTED = """
[[skip]]
tests = "test_it.py::test_listed"
reason = "there is no *"
without_programs = ["sh", "no-program-has-this-name"]
run = "nothing"

[[skip]]
tests = "test_it.py::test_there"
reason = "there is no *"
without_programs = ["sh"]
run = "nothing"

[[skip]]
tests = "test_module.py"
reason = "could not import *"
without_modules = ["no_module_has_this_name"]
run = "nothing"
"""
CONFTEST = """
from pathlib import Path
from tests import skips

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(skips.ListedSkips(skips.read(Path("skips.toml"))))
"""
TESTS = """
import pytest

def test_listed():
    pytest.skip("there is no program")

def test_passes():
    pass

@pytest.mark.xfail
def test_expected():
    assert False
"""
THERE = "import pytest\n\n@pytest.mark.skip('there is no shell')\ndef test_there():\n    pass\n"
MODULE = "import pytest\n\npytest.importorskip('{}')\n"


def run(folder: Path, *words: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "skips.toml").write_text(LISTED)
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *words, "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("words", [[], ["--numprocesses=1"]])
def test_a_skip_passes_if_it_is_listed_and_fails_otherwise(words: list[str], tmp_path: Path) -> None:
    files = {"test_it": TESTS, "test_module": MODULE.format("no_module_has_this_name")}
    done = run(tmp_path, *words, **files)
    assert done.returncode == 0, done.stdout
    files |= {"test_it": TESTS + THERE, "test_new": MODULE.format("no_module_has_this_name")}
    done = run(tmp_path, *words, **files)
    assert done.returncode == STATUS, done.stdout
    _, _, said = done.stdout.partition("does not allow here")
    assert "test_it.py::test_there: there is no shell" in said
    assert "test_new.py: could not import 'no_module_has_this_name'" in said
    assert "test_it.py::test_listed:" not in said and "test_module.py:" not in said


@pytest.mark.parametrize(
    ("condition", "value", "there"),
    [
        ("without_programs", ["sh", "python3"], True),
        ("without_programs", ["sh", "no-program-has-this-name"], False),
        ("without_modules", ["os"], True),
        ("without_modules", ["no_module_has_this_name"], False),
        ("without_names", ["os.path"], True),
        ("without_names", ["os.no_name"], False),
        ("without_variables", ["PATH"], True),
        ("without_variables", ["NO_VARIABLE_HAS_THIS_NAME"], False),
        ("as_root", os.geteuid() != 0, True),
        ("as_root", os.geteuid() == 0, False),
    ],
)
def test_what_is_there_is_no_reason(condition: str, value: object, there: bool) -> None:
    entry = Entry("a.py::*", "it needs *", condition, value, "nothing")
    assert entry.allows("a.py::test_it[1]", "it needs more") is not there
    assert not entry.allows("b.py::test_it[1]", "it needs more")
    assert not entry.allows("a.py::test_it[1]", "another reason")


def test_each_entry_is_about_tests_that_are_there() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    for entry in read():
        pattern = entry.tests.partition("::")[0]
        assert any(fnmatchcase(file, pattern) for file in files), entry.tests
