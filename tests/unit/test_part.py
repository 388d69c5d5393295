"""A part of the suite runs its failed tests once more: what passes, what stays failed, what fails at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import changed, part
from tests.part import FLAKY, MOST, options

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long

# `first()` is true once for each test: in its first run.
HELPER = """
import os, pathlib, signal, threading
import pytest

def first(name):
    path = pathlib.Path(f"{name}.ran")
    again = path.exists()
    path.write_text(path.read_text() + "x" if again else "x")
    if again:
        assert "PYTEST_XDIST_WORKER" not in os.environ, "it does not run alone"
    return not again
"""

ONCE = """
from helper import *

def test_passes():
    pass

@pytest.mark.parametrize("each", ["a b", "c::d/e[f]"])
def test_call(each):
    assert not first(f"call{len(each)}"), "a lost race"

@pytest.fixture
def setup():
    assert not first("setup"), "a lost setup"

def test_setup(setup):
    pass

@pytest.fixture
def teardown():
    yield
    assert not first("teardown"), "a lost teardown"

def test_teardown(teardown):
    pass
"""
HANGS = """
from helper import *

@pytest.mark.timeout(0.5)  # wall clock: it hangs, and pytest ends it
def test_hangs():
    if first("hangs"):
        threading.Event().wait()
"""


def run_part(folder: Path, *words: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "helper.py").write_text(HELPER)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "tests.part", "a part", "-p", "no:cacheprovider", *words]
    # Without the variables of the pytest in which this test runs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_tests_that_fail_once_are_listed(tmp_path: Path) -> None:
    """They fail in the call, in a fixture before and after it, and by a hang."""
    done = run_part(tmp_path, "--processes", "2", ".", test_once=ONCE, test_hangs=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = (tmp_path / FLAKY).read_text()
    names = [line for line in listed.splitlines() if line.startswith("## ")]
    assert sorted(names) == [
        "## a part: `test_hangs.py::test_hangs`",
        "## a part: `test_once.py::test_call[a b]`",
        "## a part: `test_once.py::test_call[c::d/e[f]]`",
        "## a part: `test_once.py::test_setup`",
        "## a part: `test_once.py::test_teardown`",
    ]
    for text in ("a lost race", "a lost setup", "a lost teardown", "Timeout"):
        assert text in listed
    assert "failed, and passed alone: test_hangs.py::test_hangs" in done.stdout


@pytest.mark.parametrize(
    "again", ["assert False", "pytest.skip('not here')", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_one_that_does_not_pass_the_second_time_fails_the_part(again: str, tmp_path: Path) -> None:
    text = f"from helper import *\n\ndef test_it():\n    assert not first('it')\n    {again}\n"
    done = run_part(tmp_path, ".", test_it=text)
    assert done.returncode == 1
    assert (tmp_path / "it.ran").read_text() == "xx"
    assert not (tmp_path / FLAKY).exists()


BAD = "import nothing_of_the_kind\n"
DIES = "import os\n\ndef test_dies():\n    os._exit(3)\n"
MANY = f"""
from helper import *

@pytest.mark.parametrize("each", range({MOST + 1}))
def test_many(each):
    assert not first(each)
"""


@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.parametrize("text", [BAD, DIES, MANY], ids=["not_collected", "dies", "many"])
def test_what_fails_the_part_at_once(text: str, processes: str, tmp_path: Path) -> None:
    """A file that cannot be collected, a process that dies, and many failures."""
    done = run_part(tmp_path, "--processes", processes, ".", test_a=text, test_once=ONCE)
    assert done.returncode not in (0, 5), done.stdout
    assert "runs again" not in done.stdout and not (tmp_path / FLAKY).exists()
    assert {path.read_text() for path in tmp_path.glob("*.ran")} <= {"x"}


def test_the_second_run_keeps_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    words = ["tests", "-m", "long and not soak", "tests::test_it", "--contract", "rest"]
    assert options(words) == ["-m", "long and not soak", "--contract", "rest"]


def test_a_group_of_which_nothing_has_changed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(changed, "paths_since_base", lambda: ["tests/rows/results.py", "docs/batches.md"])
    monkeypatch.setattr(part, "run", lambda *words: asked.append(words) or part.Outcomes(0))
    assert part.main(["test", "--changed", "tests"]) == 0
    assert asked == [("tests", "--left-out=engines", "--left-out=recipes")]
