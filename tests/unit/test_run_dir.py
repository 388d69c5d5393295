"""The run directory: one name for all workers, never shared by two runs; its record, curves and speed."""

import datetime
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.errors import ConfigurationError
from dtrain.monitor import (
    check_run_directory,
    finish_record,
    open_run_directory,
    plot_curves,
    read_record,
    summarize,
)
from dtrain.monitor.curve_image import drawn
from dtrain.monitor.event_log import EventLog
from dtrain.monitor.run_directory import RunDirectory, new_directory
from dtrain.monitor.run_files import Fence
from refusals import refused


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """One process that is the chief, in an empty directory."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_default_is_a_new_directory_under_runs(tmp_path):
    first = open_run_directory(None, name="digits", record={"seed": 1})
    second = open_run_directory(None, name="digits", record={"seed": 2})
    assert first.path != second.path
    assert first.path.parent == second.path.parent == tmp_path / "runs"
    assert first.path.name.partition("-digits")[1] == "-digits"
    assert json.loads(first.record.read_text()) == {"seed": 1}
    assert json.loads(second.record.read_text()) == {"seed": 2}


def test_runs_of_the_same_second_do_not_share():
    now = datetime.datetime(2024, 5, 6, 7, 8, 9)
    names = [new_directory("digits", now).name for _ in range(3)]
    assert names == ["20240506-070809-digits", "20240506-070809-digits-2", "20240506-070809-digits-3"]


def test_a_given_directory_is_made_with_its_parents(tmp_path):
    run = open_run_directory("a/b", name="digits", record={})
    assert run.path == tmp_path / "a" / "b"
    assert run.record.exists()


def test_a_later_attempt_takes_a_directory_over_and_the_earlier_one_writes_nothing_more(
    monkeypatch, tmp_path
):
    """The earlier process only holds its lock here: it may be stopped, or on a host that is cut off."""
    monkeypatch.setenv("DTRAIN_JOB", "this-one")
    record = {"job": "this-one", "strategy": "", "replicas": 1, "workers": 1}
    run = open_run_directory("out", name="digits", record=record)
    log = EventLog(run.events, record)
    log._write("before")
    code = (
        "from dtrain.monitor import open_run_directory\n"
        f"run = open_run_directory('out', name='digits', record={record})\n"
        "run.write_record({'by': 'the later attempt'})"
    )
    env = {**os.environ, "DTRAIN_ATTEMPT": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)
    for write in (
        lambda: run.write_record({}),
        lambda: log._write("after"),
        lambda: Fence(run).on_epoch_end(0),
    ):
        with refused(ConfigurationError, run.path, "was replaced while it was stopped or cut off"):
            write()
    assert read_record(run) == {"by": "the later attempt"}
    assert run.events.read_text().count("\n") == 1 and '"before"' in run.events.read_text()


@pytest.mark.parametrize("given", [None, "out"])
def test_a_job_that_is_started_again_keeps_its_directory(monkeypatch, given):
    monkeypatch.setenv("DTRAIN_JOB", "this-one")
    first = open_run_directory(given, name="digits", record={"job": "this-one", "attempt": 0})
    other = open_run_directory(None, name="digits", record={"job": "another"})
    monkeypatch.setenv("DTRAIN_ATTEMPT", "1")
    again = open_run_directory(given, name="digits", record={"job": "this-one", "attempt": 1})
    assert again == first != other
    assert json.loads(first.record.read_text())["attempt"] == 0


def test_a_job_that_died_before_it_had_a_directory_gets_one(monkeypatch):
    monkeypatch.setenv("DTRAIN_JOB", "this-one")
    monkeypatch.setenv("DTRAIN_ATTEMPT", "1")
    other = open_run_directory(None, name="digits", record={"job": "another"})
    assert open_run_directory(None, name="digits", record={"job": "this-one"}) != other
    with refused(ConfigurationError, other.path.resolve(), "another run", "run.json"):
        open_run_directory(other.path, name="digits", record={"job": "this-one"})


def test_an_interrupted_run_goes_on_in_its_directory_and_no_other_does():
    record = {"status": "running", "recipe": "digits", "seed": 1, "started_at": "then"}
    first = open_run_directory("out", name="digits", record=record)
    now = {**record, "started_at": "now"}
    assert open_run_directory("out", name="digits", record=now, same=("seed",)) == first
    assert read_record(first) == record
    with refused(ConfigurationError, Path("out").resolve(), "seed 1", "2"):
        open_run_directory("out", name="digits", record={**now, "seed": 2}, same=("seed",))
    for changed in ({"status": "finished"}, {"recipe": "imdb"}):
        first.write_record(record | changed)
        with refused(ConfigurationError, Path("out").resolve(), "another run", "run.json"):
            open_run_directory("out", name="digits", record=now, same=("seed",))


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    record = {"status": "running", "recipe": "digits"}
    code = f"""
from dtrain.monitor import open_run_directory
open_run_directory({str(tmp_path / "out")!r}, name="digits", record={record!r})
print("there", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "there\n"
            with refused(ConfigurationError, Path("out").resolve(), "Another process"):
                open_run_directory("out", name="digits", record=record, same=("recipe",))
        finally:
            other.kill()
    assert open_run_directory("out", name="digits", record=record, same=("recipe",)).record.exists()


def test_an_existing_directory_with_other_things_is_fine(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert open_run_directory(tmp_path, name="digits", record={}).record.exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("left", ["run.json", "metrics.csv", "model.keras"])
def test_a_directory_that_holds_another_run(tmp_path, left):
    (tmp_path / left).write_text("")
    for attempt in (check_run_directory, lambda p: open_run_directory(p, name="digits", record={})):
        with refused(ConfigurationError, tmp_path, "another run", left, "--run-dir"):
            attempt(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [left]


def test_a_claimed_directory_is_taken_at_once():
    open_run_directory("out", name="digits", record={})
    with refused(ConfigurationError, Path("out").resolve(), "another run", "run.json"):
        open_run_directory("out", name="digits", record={})


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        with refused(ConfigurationError, tmp_path / path, f"{tmp_path / 'file'} is a file"):
            check_run_directory(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with refused(ConfigurationError, tmp_path / "locked" / "run"):
        check_run_directory("locked/run")


def test_checking_makes_nothing(tmp_path):
    check_run_directory("a/b")
    check_run_directory(None)
    assert not list(tmp_path.iterdir())


def test_record_is_json_whatever_the_numbers(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_record({"loss": math.nan, "deep": [{"rate": math.inf}], "fine": 1.5, "none": None})
    assert json.loads(run.record.read_text()) == {
        "loss": None,
        "deep": [{"rate": None}],
        "fine": 1.5,
        "none": None,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_finished_record_and_its_summary(tmp_path):
    started = {
        "status": "running",
        "recipe": "digits",
        "replicas": 2,
        "workers": 2,
        "strategy": "multi_worker",
    }
    record = finish_record(
        started,
        examples_per_second=1234.56,
        wall_time_seconds=3.14159,
        final_metrics={"test_accuracy": 0.98765, "test_loss": 0.5},
        xla=False,
    )
    assert started["status"] == "running"
    assert record["status"] == "finished"
    assert record["examples_per_second"] == 1234.6
    assert record["final_metrics"] == {"test_accuracy": 0.98765, "test_loss": 0.5}
    assert record["xla"] is False
    text = summarize(record, RunDirectory(tmp_path))
    assert "test accuracy 0.9877" in text
    assert "1,235 examples/s on 2 replicas in 2 workers (multi_worker)" in text
    assert str(tmp_path) in text
    served = summarize({**record, "parameter_servers": 1}, RunDirectory(tmp_path))
    assert "on 2 workers and 1 parameter server (" in served


@pytest.mark.parametrize(
    "history",
    [
        {"loss": [2.0, 1.0], "val_loss": [2.1, 1.2], "accuracy": [0.1, 0.9], "val_accuracy": [0.1, 0.8]},
        {"loss": [1.0]},
        {"loss": [1.0, math.nan]},
    ],
)
def test_curves_are_a_png(tmp_path, history):
    pytest.importorskip("matplotlib")
    plot_curves(history, tmp_path / "curves.png", title="test")
    data = (tmp_path / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_without_matplotlib_a_picture_is_left_out_and_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"curves are drawn by matplotlib(.|\n)*pip install 'dtrain\[charts\]'"
    ):
        plot_curves({"loss": [1.0]}, tmp_path / "curves.png")
    assert not drawn(tmp_path / "curves.png", lambda path: plot_curves({"loss": [1.0]}, path))
    assert "curves.png is left out" in caplog.text and "pip install 'dtrain[charts]'" in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_rate_leaves_out_the_first_epoch_what_was_traced_and_all_but_training():
    from dtrain.telemetry.training_rate import of_epoch, of_report

    def epoch(examples, seconds, steady=None):
        parts = {"input": seconds / 4, "compute": seconds / 2, "communication": seconds / 4}
        found = {"steps": 10, "examples": examples, "parts": {**parts, "validation": 99.0, "start": 99.0}}
        return found if steady is None else found | {"steady": steady}

    def rate(record):
        return of_epoch(record).examples_per_second

    epochs = [epoch(100, 10.0), epoch(100, 1.0), epoch(100, 3.0)]
    assert [rate(each) for each in epochs] == [10.0, 100.0, pytest.approx(100 / 3)]
    assert of_report(epochs) == 50.0
    assert of_report(epochs[:1]) == 10.0
    assert rate(epoch(None, 1.0)) is None
    assert math.isnan(of_report([epoch(None, 1.0)])) and math.isnan(of_report([]))

    steady = {"steps": 8, "seconds": 2.0, "examples": 80, "waiting": 0.5}
    partly = epoch(100, 10.0, steady)
    assert (rate(partly), of_epoch(partly).step_seconds) == (40.0, 0.25)
    traced = epoch(100, 1.0, {"steps": 0, "seconds": 0.0, "examples": 0, "waiting": 0.0})
    assert of_epoch(traced).step_seconds is None and of_report([traced]) == 1.0
    assert of_report([traced, partly]) == 40.0  # the first epoch with steps that count is alone


def test_a_run_knows_the_commit_of_the_users_repository(tmp_path, monkeypatch):
    from dtrain.monitor.origin import command, commit_of, origin

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, "-C", str(tmp_path), *words], check=True, capture_output=True)

    assert commit_of(tmp_path / "missing") is None
    git("init")
    assert commit_of(tmp_path) is None  # no commit yet
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "log.txt").write_text("git does not know it")
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setattr(sys, "argv", ["dtrain"])
    found = origin()["commit"]
    assert len(found["id"]) == 40 and found["changed"] is False
    (tmp_path / "train.py").write_text("2")
    assert commit_of(tmp_path) == {"id": found["id"], "changed": True}
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None and "commit" not in origin()

    monkeypatch.setenv("DTRAIN_COMMAND", json.dumps(["dtrain", "launch", "-n", "2", "train.py"]))
    assert command() == ["dtrain", "launch", "-n", "2", "train.py"]
    monkeypatch.setenv("DTRAIN_COMMAND", "{")
    assert command() == sys.orig_argv
