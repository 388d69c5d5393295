"""A pass that freezes the processes of tests, as the command runs it: what it shows, and what it leaves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from processes import processes_with

ROOT = Path(__file__).parents[2]
# A test is over once a process that it has started was frozen.
FROZEN = """
import os, subprocess, time
from pathlib import Path

NOTES = Path(os.environ["STALLED_RUN"]) / "disturbed.txt"

def until_frozen():
    with subprocess.Popen(["sleep", "1000"]) as child:
        while not NOTES.exists() or f" {child.pid}: sleep 1000" not in NOTES.read_text():
            time.sleep(0.02)
        child.kill()
"""


def freeze(folder: Path, text: str, *options: str) -> tuple[int, str]:
    """Run a pass over some tests; its exit status and output."""
    (folder / "test_it.py").write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "tests.stalled", "freeze", "--seed", "7", "--at-once", "1"]
    done = subprocess.run(
        [*command, "--folder", str(folder / "pass"), *options, str(folder / "test_it.py")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_failures_are_shown_with_what_was_done_and_nothing_is_left(tmp_path: Path) -> None:
    status, shown = freeze(
        tmp_path,
        FROZEN
        + f"""
def test_that_fails():
    until_frozen()
    assert not "on purpose"

def test_that_passes():
    subprocess.Popen(["sh", "-c", "while :; do sleep 1000; done", "{tmp_path}"], start_new_session=True)
    until_frozen()
""",
        *("--seconds", "0.05", "--mean", "0.05"),
    )
    file = tmp_path / "pass" / "failed-test_it.py-test_that_fails.txt"
    assert status == 1, shown
    assert "freeze-0.05-7: 1 passed, 1 failed, 0 skipped; " in shown
    assert shown.splitlines()[-1] == f"FAILED test_it.py::test_that_fails  seed 7  {file}"
    assert "on purpose" in file.read_text()
    assert "frozen for 0.05 s" in file.read_text()
    assert not processes_with("while :;", str(tmp_path))


def test_a_pass_in_which_all_tests_pass(tmp_path: Path) -> None:
    status, shown = freeze(tmp_path, FROZEN + "test_it = until_frozen", "--seconds", "0.05", "--mean", "0.05")
    assert status == 0, shown


def test_a_pass_that_froze_nothing_proves_nothing(tmp_path: Path) -> None:
    status, shown = freeze(tmp_path, "def test_it(): pass", "--mean", "1e9")
    assert status == 1, shown
    assert shown.splitlines()[-1] == "THE PASS PROVES NOTHING: no process was disturbed"


def test_a_pass_has_a_limit(tmp_path: Path) -> None:
    status, shown = freeze(tmp_path, "import signal\ndef test_it(): signal.pause()", "--limit", "0.1")
    assert status == 1, shown
    assert shown.splitlines()[-1] == "THE PASS PROVES NOTHING: it did not end within 0.1 minutes"
