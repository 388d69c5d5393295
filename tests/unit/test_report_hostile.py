"""Run directories from others: a report touches nothing else, waits for nothing, and shows the rest."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from dtrain import cli
from dtrain.errors import ConfigurationError
from dtrain.monitor import check_run_directory, line_files, open_run_directory, plot_curves, read_record
from dtrain.monitor.event_log import EventLog
from dtrain.monitor.run_directory import RunDirectory
from hostile_files import KINDS, is_untouched, put, victim
from refusals import refused
from run_directories import write_run

FILES = ("run.json", "events.jsonl", "metrics.csv")


@pytest.fixture
def somebody(tmp_path: Path) -> Path:
    return victim(tmp_path / "victim")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", epochs=3, steps=4, notes=2, alarms=2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dangling link"])
def test_files_of_a_run_may_be_anything(
    run: Path, somebody: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in FILES:
        put(kind, run / file, somebody / "authorized_keys")
    assert cli.main(["report", str(run)]) == 0
    said = capsys.readouterr().err
    assert all(f"{file} " in said for file in FILES) and "cannot be read" in said
    assert is_untouched(somebody) and "ssh-ed25519" not in (run / "report.html").read_text()
    assert read_record(RunDirectory(run)) is None


def test_a_report_is_written_to_no_other_file(
    run: Path, somebody: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither by the name of the page, nor by that of the file beside it, which could once be foreseen."""
    for name in ("report.html", "run.json", "curves.png", ".attempt"):
        (run / f".{name}.{os.getpid()}.tmp").symlink_to(somebody / "authorized_keys")
    (run / "report.html").symlink_to(somebody / "nothing")
    assert cli.main(["report", str(run)]) == 0
    assert (run / "report.html").is_file() and not (run / "report.html").is_symlink()
    directory = RunDirectory(run)
    directory.write_record({"a": 1})
    plot_curves({"loss": [1.0, 0.5]}, directory.curves)
    assert is_untouched(somebody)
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(somebody / "authorized_keys")
    assert cli.main(["report", str(run)]) == 2, "it is no report"
    assert is_untouched(somebody)


ODD = ("1e308", "-1e308", "5e-324", "1e300", "-1e300", "1e-300", "Infinity", "-Infinity", "NaN", "-1", "1e18")


@pytest.mark.parametrize("value", [*ODD, "9" * 5000], ids=lambda value: value[:10])
def test_numbers_may_be_of_any_size(run: Path, value: str, tmp_path: Path) -> None:
    lines = (run / "metrics.csv").read_text().splitlines()
    width = len(lines[0].split(","))
    lines[2] = ",".join(["1", *[value] * (width - 1)])
    lines += [",".join([value] * width)]
    events = (run / "events.jsonl").read_text().splitlines()
    odd = [re.sub(r'": -?[0-9.e-]+', f'": {value}', event) for event in events]
    for name, found in (("metrics", []), ("events", [*events, *odd]), ("both", [*events[:9], *odd])):
        other = write_run(tmp_path / name)
        (other / "metrics.csv").write_text("\n".join(lines))
        (other / "events.jsonl").write_text("\n".join(found))
        if name == "events":
            (other / "metrics.csv").unlink()
        assert cli.main(["report", str(other)]) == 0
    page = str(tmp_path / "page.html")
    assert cli.main(["report", str(tmp_path / "both"), str(run), "--output", page]) == 0


def test_lines_and_columns_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    event = b'{"kind":"steps","time":1}\n'
    assert len(line_files.parse_events(event * 3)[0]) == 3
    long = b'{"kind":"steps","time":1,"text":"' + b"x" * (16 << 20) + b'"}\n'
    found, problems = line_files.parse_events(event + long + event)
    assert len(found) == 2 and "1 of its lines cannot be read" in problems[0]
    many = b'{"kind":"steps","time":1,"workers":[' + b"{}," * 100 + b"{}]}"
    monkeypatch.setattr(line_files, "_MOST_VALUES", 102)
    found, problems = line_files.parse_events(many)
    assert not found and problems[0].startswith("events.jsonl has 103 lists and objects")
    monkeypatch.setattr(line_files, "_MOST_LINES", 2)
    found, problems = line_files.parse_events(event * 3)
    assert len(found) == 2 and problems == ["events.jsonl has more than 2 lines; the others were left out."]
    wide = ",".join(["epoch", *map(str, range(20_000))]).encode()
    assert line_files.parse_metrics(wide + b"\n")[1][0].startswith("metrics.csv has 20001 columns")


@pytest.mark.parametrize("kind", [*KINDS, "hard link"])
@pytest.mark.parametrize("file", ["metrics.csv", "tensorboard/train", "backups"])
def test_a_run_does_not_resume_in_a_directory_with_links(
    tmp_path: Path, somebody: Path, kind: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras' callbacks would write through them, and a checkpoint would be read from another folder."""
    if kind == "sparse" or (kind == "directory" and file != "metrics.csv"):
        return
    monkeypatch.delenv("TF_CONFIG", raising=False)
    record = {"status": "running", "recipe": "digits"}
    path = tmp_path / "run"
    (path / file).parent.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(record))
    if kind == "hard link":
        (path / file).hardlink_to(somebody / "authorized_keys")
    else:
        put(kind, path / file, somebody)
    for attempt in range(2):
        with refused(ConfigurationError, path, path / file):
            open_run_directory(path, name="digits", record=record, same=["recipe"])
        if attempt == 0:
            with refused(ConfigurationError, path / file):
                check_run_directory(path, again=True)
    assert is_untouched(somebody)


def test_a_dangling_link_is_no_vacant_place(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").symlink_to(tmp_path / "nothing")
    with refused(ConfigurationError, tmp_path / "run" / "metrics.csv"):
        check_run_directory(tmp_path / "run")


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "hard link"])
def test_events_are_appended_to_the_runs_own_file(
    tmp_path: Path, somebody: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    if kind == "hard link":
        path.hardlink_to(somebody / "authorized_keys")
    else:
        put(kind, path, somebody / "authorized_keys")
    log = EventLog(path, {"strategy": "mirrored", "replicas": 1, "workers": 1})
    log._write("begin", loss=np.float32(1))
    assert f"{path} cannot be written" in caplog.text and "continues without it" in caplog.text
    assert is_untouched(somebody) and not (somebody / "nothing").exists()
