"""`dtrain runs`: the list of runs, and a command that is run again only as its user wants it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from run_directories import write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", epochs=2, workers=3)
    write_run(tmp_path / "runs" / "sub" / "b", epochs=2, workers=1, status="running", end="failed")
    return tmp_path / "runs"


def command_of(run: Path, command: Any) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "command": command}))


def answer(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: given)


def test_runs_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "c\x1b[31m", epochs=1, record={"version": 3})
    assert cli.main(["runs"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "strategy", "metric", "time"]
    assert rows[0].split()[:6] == ["a", "finished", "multi_worker,", "3", "replicas", "test_accuracy"]
    assert rows[2].startswith("sub/b") and "failed, last event" in rows[2] and "val_accuracy" in rows[2]
    assert "\x1b" not in rows[1] and "format version 3" in rows[1]
    assert cli.main(["runs", "nowhere"]) == 0
    assert "There is no run in" in capsys.readouterr().out


def test_a_command_is_shown_and_run_again_if_the_user_agrees(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import pathlib, sys; pathlib.Path('done').write_text(sys.argv[1]); sys.exit(3)"
    command_of(runs / "a", [sys.executable, "-c", program, "a b; $(x)"])
    answer(monkeypatch, "n")
    assert cli.main(["runs", "--rerun", "a"]) == 0
    out = capsys.readouterr().out
    assert "'a b; $(x)'" in out and "Nothing was run." in out and not Path("done").exists()
    answer(monkeypatch, "y")
    assert cli.main(["runs", "--rerun", "a"]) == 3
    assert Path("done").read_text() == "a b; $(x)"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (None, "holds no command"),
        ([], "holds no command"),
        (["python", 3], "holds no command"),
        ("rm -r x", "holds no command"),
        (["echo", "a\rb"], "cannot be shown"),
        (["echo", "\u202eab"], "cannot be shown"),
        (["echo", "x" * 5000], "cannot be shown"),
        (["/no/such/program"], "cannot be run"),
    ],
)
def test_a_command_that_cannot_be_run(
    command: Any,
    said: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command_of(runs / "a", command)
    answer(monkeypatch, "y")
    assert cli.main(["runs", "--rerun", "a"]) == 2
    assert said in capsys.readouterr().err


def test_a_record_that_others_may_write_is_not_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "y")
    (runs / "a" / "run.json").chmod(0o666)
    assert cli.main(["runs", "--rerun", "a"]) == 2
    (runs / "a" / "run.json").rename(runs / "kept")
    (runs / "a" / "run.json").symlink_to(runs / "kept")
    assert cli.main(["runs", "--rerun", "a"]) == 2
    assert cli.main(["runs", "--rerun", "../a"]) == 2
    said = capsys.readouterr().err
    assert "may write to it" in said and "cannot be read" in said and "There is no run '../a'" in said
