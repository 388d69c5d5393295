"""`dtrain init` writes a file that `dtrain launch --config` takes, and replaces none."""

from __future__ import annotations

import argparse
import io
import tomllib
from pathlib import Path

import pytest

from dtrain import cli
from dtrain.cli import launch
from dtrain.cli.parser import Parser
from dtrain.cli.worker_counts import Workers


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").touch()
    return tmp_path


def answered(monkeypatch: pytest.MonkeyPatch, *answers: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
    return cli.main(["init"])


def as_launched(file: Path) -> argparse.Namespace:
    parser = Parser(prog="dtrain launch")
    launch.add_arguments(parser)
    found: argparse.Namespace = parser.parse_args(["--config", str(file)])
    return found


def test_the_answers_are_the_options_of_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = 'logs "of" \\ mine'
    assert answered(monkeypatch, "", "", "4", "2", odd) == 0
    found = as_launched(folder / "job.toml")
    assert (found.script, found.workers, found.ps, found.log_dir) == ("main.py", Workers(4, 4), 2, odd)


def test_an_answer_that_cannot_be_used_is_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(monkeypatch, "no.py", "main.py", "a:x", "a:2,b:2", "two", "0", "") == 0
    shown = capsys.readouterr().out
    assert "There is no script 'no.py'" in shown and "'a:x'" in shown and "'two' is not an integer" in shown
    assert "How many workers" not in shown  # the hosts say it
    assert "dtrain launch --config job.toml" in shown
    values = tomllib.loads((folder / "job.toml").read_text())
    assert values == {"script": "main.py", "hosts": "a:2,b:2"}


def test_answers_that_contradict_each_other_are_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(monkeypatch, "", "", "1:4", "2", "") == 2
    assert "min_workers is 1, but with parameter servers" in capsys.readouterr().err
    assert not (folder / "job.toml").exists()


def test_with_yes_nothing_is_asked_and_no_file_is_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--yes"]) == 0
    written = (folder / "job.toml").read_text()
    assert tomllib.loads(written) == {"script": "main.py"}
    assert cli.main(["init", "--yes", "main.py"]) == 2
    assert "job.toml exists, and is kept" in capsys.readouterr().err
    assert (folder / "job.toml").read_text() == written
    (folder / "link.toml").symlink_to(folder / "nowhere.toml")
    assert cli.main(["init", "--yes", "--output", "link.toml"]) == 2
    assert not (folder / "nowhere.toml").exists()


def test_what_it_cannot_know_or_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(monkeypatch) == 2
    assert "Which script trains?" in (said := capsys.readouterr().err) and "--yes" in said
    assert cli.main(["init", "--yes", "--output", "none/job.toml"]) == 2
    assert "none/job.toml cannot be written" in capsys.readouterr().err
    (folder / "other.py").touch()
    assert cli.main(["init", "--yes"]) == 2
    assert "There is no train.py" in capsys.readouterr().err
    (folder / "train.py").touch()
    assert cli.main(["init", "--yes"]) == 0
    assert tomllib.loads((folder / "job.toml").read_text()) == {"script": "train.py"}
