"""`dtrain report`: what its page says, and a clear message for whatever cannot be read."""

from __future__ import annotations

import fcntl
import html.parser
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.monitor.line_files import parse_events
from dtrain.monitor.report.thinning import thin_curve
from dtrain.monitor.run_directory import RunDirectory, is_locked, lock_run_directory
from dtrain.monitor.run_reader import read_run
from given_clock import GivenClock
from run_directories import write_metrics, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" onload='x' & \x00\ud800"
IN_FRESH_PYTHON = """
import sys
from dtrain.cli import main
status = main(sys.argv[1:])
print("imported:", sorted({"tensorflow", "keras"} & set(sys.modules)))
sys.exit(status)
"""


def command(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "report", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


class Page(html.parser.HTMLParser):
    """What a page consists of: its elements, its text, and the data of its charts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self._inside = ""
        self.feed(self.source)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if tag == "script":
            self._inside = dict(attrs).get("type") or "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "application/json":
            self.charts.append(json.loads(data))
        elif not self._inside:
            self.pieces.append(data)


def page_of(*arguments: str | Path, output: Path) -> Page:
    assert cli.main(["report", *map(str, arguments), "--output", str(output)]) == 0
    return Page(output)


# What cannot be reported on.


def _nothing(path: Path) -> None:
    pass


def _file(path: Path) -> None:
    path.write_text("{}")


def _empty(path: Path) -> None:
    path.mkdir()


def _no_run(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("hello")


def _newer(path: Path) -> None:
    write_run(path, epochs=1, record={"version": 2})


def _no_version(path: Path) -> None:
    write_run(path, epochs=1, record={"version": True})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_nothing, ["There is no directory", "Hint:"]),
        (_file, ["is a file, not a run directory"]),
        (_empty, ["is empty", "run.json, events.jsonl or metrics.csv"]),
        (_no_run, ["is not a run directory: it holds none of run.json, events.jsonl"]),
        (_newer, ["has format version 2; this dtrain reads 0 and 1"]),
        (_no_version, ["has format version True; this dtrain reads 0 and 1"]),
    ],
)
def test_what_is_no_run_is_a_message_and_2(
    make: Callable[[Path], None], said: list[str], tmp_path: Path
) -> None:
    make(tmp_path / "it")
    done = command("it", cwd=tmp_path)
    assert done.returncode == 2
    assert all(each in done.stderr for each in said), done.stderr
    assert not list(tmp_path.rglob("*.html"))


def test_each_path_without_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = command("empty", "missing", cwd=tmp_path)
    assert done.returncode == 2
    assert "None of the 2 directories" in done.stderr
    assert "is empty" in done.stderr and "There is no directory" in done.stderr


# What can be reported on in part.


def _half_record(path: Path) -> None:
    (path / "run.json").write_text((path / "run.json").read_text()[:100])


def _listed_record(path: Path) -> None:
    (path / "run.json").write_text("[1, 2]")


def _no_record(path: Path) -> None:
    (path / "run.json").unlink()


def _odd_record(path: Path) -> None:
    odd = {"replicas": "two", "epochs": None, "final_metrics": [1], "versions": 3, "input": 1, "command": 7}
    record = {**json.loads((path / "run.json").read_text()), **odd, "strategy": {"a": 1}, "workers": 10**400}
    record["divided"] = {"parameters": [1], "optimizer": {"whole": 10**400, "replica": "x"}}
    (path / "run.json").write_text(json.dumps(record))


def _bad_lines(path: Path) -> None:
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[2:4] = [b"garbage\n", b'{"kind":"epoch","time":1e999}\n']
    lines[5] = b'{"kind":"steps","time":17,"loss":"\xff\xfe"}\n'
    lines[7] = b'{"time":17}\n'
    lines[8] = b"[" * 100_000 + b"\n"
    (path / "events.jsonl").write_bytes(b"".join(lines))


def _torn_events(path: Path) -> None:
    content = (path / "events.jsonl").read_bytes()
    (path / "events.jsonl").write_bytes(content[:-9])


def _utf_16(path: Path) -> None:
    (path / "events.jsonl").write_text((path / "events.jsonl").read_text(), encoding="utf-16")


def _unreadable(path: Path) -> None:
    (path / "events.jsonl").unlink()
    (path / "events.jsonl").mkdir()


def _newer_events(path: Path) -> None:
    events = (path / "events.jsonl").read_text().replace('"version": 1', '"version": 7')
    (path / "events.jsonl").write_text(events)


def _odd_events(path: Path) -> None:
    odd = [
        {"kind": "epoch", "time": 1, "epoch": 0, "parts": 3, "logs": {"loss": "x"}, "workers": [3, {}]},
        {"kind": "epoch", "time": 1, "epoch": -1, "causes": [{"share": "half"}, None]},
        {"kind": "epoch", "time": 1, "epoch": 1, "causes": [{"share": None}], "workers": [{"task": 3}]},
        {"kind": "steps", "time": 1e300, "step": None, "loss": "x"},
        {"kind": "steps", "time": -5, "step": 10**400},
        {"kind": "alarm", "time": 1e18, "epoch": "x", "step": [], "alarm": 3},
        {"kind": "checkpoint", "time": -1e18, "step": 2.5},
        {"kind": "plan", "time": 2, "rows": "x", "communications": [3, {"bytes": []}], "gathered": {}},
        {"kind": "begin", "time": 2},
        {"kind": "of another time", "time": 3},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in odd))


def _ragged_metrics(path: Path) -> None:
    (path / "events.jsonl").unlink()
    (path / "metrics.csv").write_text('epoch,loss,x\n0,0.5,nan\n1,0.4\n2,0.3,"[1, 2]"\nx,1,2\n3,0.2')


def _no_epoch_column(path: Path) -> None:
    (path / "events.jsonl").unlink()
    (path / "metrics.csv").write_text("a,b\n1,2\n")


def _binary_metrics(path: Path) -> None:
    (path / "events.jsonl").unlink()
    (path / "metrics.csv").write_bytes(bytes(range(256)) * 8)


def _empty_metrics(path: Path) -> None:
    (path / "events.jsonl").unlink()
    (path / "metrics.csv").write_text("")


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_half_record, "run.json is not valid JSON, or is incomplete"),
    (_listed_record, "run.json holds list, not an object"),
    (_no_record, "run.json is missing"),
    (_odd_record, ""),
    (_bad_lines, "events.jsonl: 5 of its lines cannot be read and were left out (3, 4, 6, 8, 9)"),
    (_torn_events, "events.jsonl: its last line is torn"),
    (_utf_16, "events.jsonl: "),
    (_unreadable, "events.jsonl cannot be read: Is a directory"),
    (_newer_events, "events.jsonl has format version 7; this dtrain reads 0 and 1"),
    (_odd_events, ""),
    (_ragged_metrics, "metrics.csv: 2 of its lines cannot be read and were left out (3, 5)"),
    (_no_epoch_column, "metrics.csv has no column 'epoch'"),
    (_binary_metrics, "metrics.csv"),
    (_empty_metrics, "metrics.csv is empty"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_what_is_damaged_is_named_and_the_rest_is_shown(
    damage: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "it", epochs=3)
    damage(run)
    assert cli.main(["report", str(run)]) == 0
    text = Page(run / "report.html").text
    assert said in capsys.readouterr().err and said in text
    assert bool(said) == ("Not all could be read" in text)


def test_all_damages_at_once_through_the_command(tmp_path: Path) -> None:
    names = []
    for damage, _ in DAMAGES:
        names.append(damage.__name__)
        damage(write_run(tmp_path / names[-1], epochs=3))
    done = command(*names, cwd=tmp_path)
    assert done.returncode == 0
    text = Page(tmp_path / "report.html").text
    assert all(said in done.stderr and said in text for _, said in DAMAGES)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=1)
    (run / "events.jsonl").chmod(0)
    done = command(run)
    assert done.returncode == 0
    assert "events.jsonl cannot be read: Permission denied" in done.stderr


def test_ragged_metrics_keep_their_whole_lines(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=1)
    _ragged_metrics(run)
    epochs = {epoch.number: dict(epoch.logs) for epoch in read_run(run).epochs}
    assert epochs == {0: {"loss": 0.5, "x": None}, 2: {"loss": 0.3}}


# What state a run is in.


def test_a_run_at_work_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=2, status="running", end=None)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind":"steps","ti')  # as it is while a line is written
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        done = command(run)
    finally:
        os.close(descriptor)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"still running, last event \d+ d ago", Page(run / "report.html").text)


@pytest.mark.parametrize(
    ("end", "state", "said"),
    [
        (None, "left", "ended without finishing"),
        ("failed", "failed", "failed, last event"),
        ("finished", "left", "training is complete, but its program ended early"),
    ],
)
def test_a_run_that_nobody_works_on(end: str | None, state: str, said: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=2, status="running", end=end)
    assert read_run(run).state == state
    assert said in page_of(run, output=tmp_path / "page.html").text


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running", "recipe": "digits"}')
    (tmp_path / "metrics.csv").write_text("epoch,loss\n0,0.")
    lock_run_directory(RunDirectory(tmp_path))
    done = command(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = Page(tmp_path / "report.html").text
    assert "still running, last event" in text and "of its lines" not in text
    (tmp_path / "events.jsonl").write_text("{\n")  # not a part of a line: it has its end
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "1 of its lines cannot be read" in Page(tmp_path / "report.html").text


def test_who_asks_for_the_lock_does_not_keep_a_run_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    asking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    assert is_locked(directory) is False, "two who ask do not take each other for a run"

    class Ending(GivenClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            os.close(asking)  # a second pause would fail here

    clock = Ending()
    lock_run_directory(directory, clock=clock)
    assert clock.now() > 1000.0
    assert is_locked(directory) is True


# What the page says.


def test_a_run_with_all_that_can_happen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", epochs=6, workers=3, slow=1, alarms=2, restarted_in=3)
    page = page_of(run, "--title", "A title", output=tmp_path / "page.html")
    assert ("meta", {"name": "generator", "content": "dtrain report 0.1.0"}) in page.elements
    for said in (
        "A title ✓ finished recipe digits strategy multi_worker replicas 3 workers 3",
        "examples/s 1,200",
        "test accuracy 0.9556",
        "1 worker slow.",
        "worker 1 takes 2.0 times as long",
        "slow worker 6 of 6",
        "the replicas communicate in 2 rounds, one after another: 1 sum of 3,136 bytes and 1 gather",
        "No rule divides Unique (ranked/Unique, train.py:31)",
        "gather in a loop or branch 40,960 dense/BiasAdd ranked/Unique train.py:31",
        "the loss is 17.5 at step 120",
        "Callbacks that took longest TensorBoard 120 ms, CSVLogger 24 ms",
        "6 checkpoints, at most 60 steps apart, training waited",
        "42 s 11.9 s 4 3 3 finished",  # the second attempt, 42 s after the first one
        "learning_rate 0.003",
        "communication.reason all on CPUs, without MPI",
    ):
        assert said in page.text, said
    titles = ["loss", "accuracy", "loss, step by step", "examples/s", "time per step", "learning rate"]
    assert all(title in page.text for title in titles)
    loss = page.charts[0]
    assert [(line["name"], line["x"]) for line in loss["lines"]] == [
        ("training", [1, 2, 3, 4, 5, 6]),
        ("validation", [1, 2, 3, 4, 5, 6]),
    ]
    marks = [attributes["class"] for tag, attributes in page.elements if tag == "g" and "class" in attributes]
    assert marks.count("mark alarm") == 3 * 2  # in the charts of loss, accuracy and loss by step
    assert marks.count("mark attempt") == 3  # in those by time


def test_the_longest_way_from_a_checkpoint_to_the_next_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=4, steps=60)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    # The one of step 120 is missing; a second attempt saved step 60 once more.
    saved = [event for event in events if event["kind"] == "checkpoint"]
    events.remove(saved[1])
    events.append(saved[0])
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = page_of(run, output=tmp_path / "page.html").text
    assert "4 checkpoints, at most 120 steps apart, training waited" in text
    one = page_of(write_run(tmp_path / "one", epochs=1), output=tmp_path / "one.html").text
    assert "1 checkpoint, training waited" in one


def test_how_long_training_stood_still_and_the_wall_time_are_one_number_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=1, restarted_in=0)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["kind"] == "checkpoint":
            event["seconds"] = 0.0103  # copying the state; waiting for an earlier checkpoint is not in it
        if event["kind"] == "epoch":
            event["parts"]["checkpoint"] = 0.0863
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = page_of(run, output=tmp_path / "page.html").text
    assert "checkpoint 86.3 ms" in text and "1 checkpoint, training waited 86.3 ms within the epochs." in text
    goodput = read_run(run).goodput
    assert goodput is not None
    assert f"wall time {goodput.wall_seconds:.3g} s 1 epoch" in text


def test_goodput_is_drawn_and_told_of_all_attempts(tmp_path: Path) -> None:
    """From the events of a run that has not ended, and from the record of one that has."""
    run = write_run(tmp_path / "it", epochs=4, restarted_in=2, status="running", end=None)
    goodput = read_run(run).goodput
    assert goodput is not None
    assert (goodput.steps, goodput.repeated_steps, goodput.attempts) == (4 * 60, 28, 2)
    assert goodput.seconds["restart"] == pytest.approx(42.0 - 5.0, abs=0.01)
    done = command(run)
    said = f"it: goodput {100 * goodput.share:.0f}% of "
    assert (
        said in done.stdout and "240 steps (28 steps repeated); lost: restart 37 s, start 10 s" in done.stdout
    )
    page = Page(run / "report.html")
    assert f"goodput {100 * goodput.share:.0f}% of the wall time" in page.text
    assert "240 28 restart 37 s, start 10 s, repeated" in page.text
    assert (
        "restart 37 s" in page.text and "from a failure to the first process of the next attempt" in page.text
    )
    drawn = re.search(r'aria-label="shares of the time of it">(.*?)</svg>', page.source)
    assert drawn is not None
    kinds = ["productive", "input", "checkpoint", "callbacks", "validation", "start", "tracing"]
    assert re.findall(r'class="p-(\w+)"', drawn[1]) == [*kinds, "repeated", "restart", "other"]

    record = {"share": 0.5, "steps": 7, "repeated_steps": 0, "attempts": 1}
    record["seconds"] = {**dict.fromkeys(goodput.seconds, 0.0), "productive": 5.0, "start": 5.0}
    ended = write_run(tmp_path / "ended", record={"goodput": record})
    both = page_of(run, ended, output=tmp_path / "both.html")
    assert "50% 10 s 7 0 start 5 s" in both.text


def test_a_run_of_an_earlier_dtrain_has_no_goodput(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=2)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        event.pop("elapsed", None)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    done = command(run)
    assert done.returncode == 0 and "goodput" not in done.stdout
    assert "goodput" not in Page(run / "report.html").text


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "it", epochs=4, restarted_in=2, notes=8))
    assert len(run.steps.step) == 4 * 8 + 4
    steps = [run.steps.step[place] for place in run.steps.counted]
    assert len(steps) == 4 * 8 and steps == sorted(steps)
    clock = list(run.steps.clock)
    assert clock == sorted(clock)
    assert clock[-1] < 42.0, "the pause between the attempts is not trained"
    assert [attempt.number for attempt in run.attempts] == [0, 1]


def test_a_line_that_a_dead_attempt_left_torn_is_no_damage(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=4, restarted_in=2)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if '"attempt": 1' in line)
    lines[place - 1] = '{"kind": "ste\n'
    (run / "events.jsonl").write_text("".join(lines))
    found = read_run(run)
    assert (found.problems, len(found.attempts)) == ((), 2)


def test_an_epoch_that_was_made_again_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=2)
    (run / "metrics.csv").unlink()
    event = {"kind": "epoch", "time": 1.8e9, "epoch": 1, "logs": {"loss": 7.0}, "parts": {}}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event))  # whole, though its line has no end
    epochs = read_run(run).epochs
    assert [epoch.number for epoch in epochs] == [0, 1]
    assert dict(epochs[1].logs) == {"loss": 7.0}


def test_a_run_of_an_earlier_dtrain_has_its_metrics(tmp_path: Path) -> None:
    run = tmp_path / "old"
    run.mkdir()
    write_metrics(run, [{"loss": 0.5, "val_loss": 0.6, "examples_per_second": 100.0}] * 2)
    (run / "run.json").write_text('{"status": "finished", "recipe": "digits"}')
    page = page_of(run, output=tmp_path / "page.html")
    assert "examples/s 100" in page.text and "validation loss 0.6" in page.text
    assert "Where the time went" not in page.text
    new = page_of(write_run(tmp_path / "new", epochs=2), output=tmp_path / "new.html")
    assert "Where the time went" in new.text
    assert page.text.count("Not all could be read") == 0


def test_a_run_of_a_second_has_its_rate_by_epoch(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "it", epochs=2, notes=1), output=tmp_path / "page.html")
    assert [chart["axis"] for chart in page.charts] == ["epoch"] * 3  # loss, accuracy, examples/s


def test_the_page_says_which_parts_were_not_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=2)
    usual = page_of(run, output=tmp_path / "usual.html")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in lines:
        if event["kind"] == "epoch":
            event["unmeasured"] = ["input", "communication", 7]
            event["steady"] = {"steps": 50, "seconds": 2.0, "examples": 1000, "waiting": None}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    page = page_of(run, output=tmp_path / "page.html")
    said = "communication and input within steps counts as compute"
    assert said in page.text and said not in usual.text
    assert read_run(run).epochs[0].steady == (50, 2.0, 1000, None)


def test_nan_is_a_gap(tmp_path: Path) -> None:
    run = tmp_path / "it"
    run.mkdir()
    write_metrics(run, [{"loss": 0.5}, {"loss": float("nan")}, {"loss": 0.4}])
    page = page_of(run, output=tmp_path / "page.html")
    assert page.charts[0]["lines"][0]["y"] == [0.5, None, 0.4]


def test_several_runs_are_drawn_over_each_other(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, epochs=3, seed=seed, workers=seed, record={"learning_rate": rate})
        for name, seed, rate in (("a/first", 1, 0.1), ("b/first", 2, 0.1), ("last", 3, 0.2))
    ]
    done = command(*runs, runs[0], tmp_path / "none", cwd=tmp_path)
    assert done.returncode == 0
    assert "There is no directory" in done.stderr
    page = Page(tmp_path / "report.html")
    names = ["a/first", "b/first", "last"]
    assert [line["name"] for line in page.charts[0]["lines"]] == names
    toggles = [a["data-toggle"] for tag, a in page.elements if tag == "button"]
    assert toggles == ["0", "1", "2"]
    assert f"{tmp_path / 'none'} ✕ no report" in page.text
    assert "6 settings differ between the runs" in page.text
    differing = re.findall(r'<tr class="differs">.*?<code>(.*?)</code>', page.source)
    assert differing == ["strategy", "strategy_class", "replicas", "workers", "learning_rate", "seed"]


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    for name in ("a", "b", "later/c"):
        write_run(tmp_path / "runs" / name, epochs=2)
    (tmp_path / "runs" / "notes").mkdir()
    done = command("runs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"The report on 3 runs was written to {tmp_path / 'runs' / 'report.html'}")
    page = Page(tmp_path / "runs" / "report.html")
    assert [line["name"] for line in page.charts[0]["lines"]] == ["a", "b", "c"]


def test_what_users_write_stays_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a <b> & 'c'",
        epochs=2,
        slow=0,
        alarms=1,
        record={"recipe": EVIL, "strategy": EVIL, "command": [EVIL], "versions": {EVIL: EVIL}, EVIL: EVIL},
    )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["kind"] == "epoch":
            event["logs"][EVIL] = 1.0
            event["parts"][EVIL] = 0.5
            event["workers"][0] |= {"task": EVIL, "host": EVIL}
            event["causes"] = [{"cause": EVIL, "share": 0.5, "text": EVIL}]
        if event["kind"] in ("alarm", "checkpoint"):
            event |= {"text": EVIL, "alarm": EVIL}
        if event["kind"] in ("begin", "end"):
            event |= {"strategy": EVIL, "status": EVIL}
        if event["kind"] == "plan":
            event["communications"][0] |= dict.fromkeys(("kind", "of", "needed_by", "line"), EVIL)
            event["gathered"][0] |= dict.fromkeys(("operation", "name", "line"), EVIL)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    other = write_run(tmp_path / "</script><i>", epochs=2)
    for arguments in ([run], [run, other]):
        page = page_of(
            *arguments,
            "--title",
            EVIL.replace("\x00", "").replace("\ud800", ""),
            output=tmp_path / "page.html",
        )
        tags = [tag for tag, _ in page.elements]
        assert tags.count("script") == len(page.charts) + 1
        assert not {"img", "b", "i"} & set(tags)
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
        assert "<img src=x onerror=alert(2)>" in page.text


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "it", epochs=2), output=tmp_path / "page.html")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page.source)
    places = {(t, n, a[n]) for t, a in page.elements for n in ("src", "href", "srcset", "data") if n in a}
    assert {(tag, name) for tag, name, value in places if not str(value).startswith("#")} == {
        ("link", "href")
    }
    assert ("link", "href", "data:,") in places


def test_a_spike_stays_in_a_curve_of_many_points() -> None:
    x = [float(step) for step in range(100_000)]
    y = [1.0] * 100_000
    y[77_777], y[5] = 9.0, float("nan")
    thin_x, thin_y, left_out = thin_curve(x, y, 600)
    assert left_out and len(thin_x) <= 600
    assert (77_777.0, 9.0) in zip(thin_x, thin_y, strict=True)
    assert (thin_x[0], thin_x[-1]) == (0.0, 99_999.0)
    assert thin_curve(x[:600], y[:600], 600) == (x[:600], y[:600], False)


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", epochs=100, steps=100, notes=100)
    events, problems = parse_events((run / "events.jsonl").read_bytes())
    assert (len(events), problems) == (2 + 100 * 102 + 1, [])
    spike = next(event for event in events if event.get("step") == 7777)
    spike["loss"] = 123.0
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = page_of(run, output=tmp_path / "page.html")
    by_step = page.charts[2]["lines"][0]
    assert len(by_step["x"]) <= 600
    assert (7777, 123) in zip(by_step["x"], by_step["y"], strict=True)
    assert "Long curves were thinned, from " in page.text
    assert "Each bar of long is the mean of 3 epochs." in page.text


@pytest.mark.long
def test_huge_runs_make_a_page_of_less_than_3_mb(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs" / "0", epochs=1000, steps=1000, notes=100, alarms=500)]
    runs += [
        write_run(tmp_path / "runs" / f"{seed}", epochs=1000, notes=4, seed=seed) for seed in range(1, 20)
    ]
    page_of(*runs, output=tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3e6


# Where it is written.


def test_only_a_report_is_written_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=1)
    assert command(run).returncode == 0
    before = (run / "report.html").read_text()
    assert command(run, "--title", "again").returncode == 0
    assert "again" in (run / "report.html").read_text() != before
    (run / "report.html").write_text("<html>my own</html>")
    done = command(run)
    assert done.returncode == 2
    assert "already exists and is not a report of dtrain" in done.stderr and "--output" in done.stderr
    assert (run / "report.html").read_text() == "<html>my own</html>"
    assert sorted(file.name for file in run.iterdir()) == [
        "events.jsonl",
        "metrics.csv",
        "report.html",
        "run.json",
    ]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("no/such/page.html", "there is no directory"),
        ("it", "is a directory"),
        ("/dev/null", "is not a report"),
        ("x" * 300 + ".html", "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_to(
    output: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "it", epochs=1)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "it", "--output", output]) == 2
    assert said in capsys.readouterr().err


# What is imported.


@pytest.mark.usefixtures("as_installed")
def test_no_tensorflow_is_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", epochs=1)
    done = subprocess.run(
        [sys.executable, "-c", IN_FRESH_PYTHON, "report", str(run)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "imported: []" in done.stdout, done.stderr
