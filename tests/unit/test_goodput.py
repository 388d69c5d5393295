"""Goodput: the share of the wall time in steps that count, from the events of attempts on a given clock."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.environments import settings
from dtrain.monitor import elapsed as elapsed_module
from dtrain.monitor import event_log
from dtrain.monitor.elapsed import elapsed, process_began, run_begins
from dtrain.monitor.goodput import KINDS, Goodput, goodput_of, of_record
from dtrain.monitor.line_files import read_events
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import TrainingClock
from given_clock import GivenClock

BEGAN = 1_760_000_000.0


class Attempt:
    """The lines of one process, which spends time by part.

    Args:
        lines: the lines of all attempts, to which it adds its own.
        number: the number of the attempt.
        began: the time at which the process starts, in seconds after the job.
        jump: the seconds by which the system's clock is set forward after the start.
    """

    def __init__(self, lines: list[dict[str, Any]], number: int, began: float, *, jump: float = 0.0) -> None:
        self.lines, self.number, self.began, self.jump = lines, number, began, jump
        self.spent = dict.fromkeys(("before", *events.PARTS), 0.0)
        self.waiting = 0.0

    @property
    def now(self) -> float:
        return self.began + sum(self.spent.values())

    def add(self, kind: str, *, step: int, waiting: float = 0.0, **more: Any) -> None:
        """Spend seconds, given by part, and write a line."""
        for part in [name for name in more if name in self.spent]:
            self.spent[part] += more.pop(part)
        self.waiting += waiting
        line = {
            "kind": kind,
            "time": BEGAN + self.now + self.jump,
            "attempt": self.number,
            "process": BEGAN + self.began,
            "step": step,
            "elapsed": {**{k: v for k, v in self.spent.items() if v}, "waiting": self.waiting},
        }
        self.lines.append({**line, **more})


def killed_at_7(lines: list[dict[str, Any]]) -> None:
    """Six seconds until the first step; each step has a second; killed 0.5 s after step 7, saved at 5."""
    first = Attempt(lines, 0, 0.25)
    first.add("begin", step=0, before=3.75, other=1.0, start=0.5, checkpoint=0.5, job_began=BEGAN)
    first.add("steps", step=4, compute=2.5, input=1.0, communication=0.5, waiting=0.25, start=1.0)
    first.add("steps", step=7, compute=2.25, input=0.25, communication=0.5, waiting=0.5, checkpoint=0.125)
    assert first.now == 14.125


def test_a_kill_at_step_7_with_a_checkpoint_at_5_repeats_two_steps() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    second = Attempt(lines, 1, 16.0)
    failed = {"failed_at": BEGAN + 14.625, "failed_step": 7}
    second.add("begin", step=5, before=2.0, other=0.25, start=0.25, checkpoint=1.0, **failed)
    second.add("steps", step=8, compute=3.0, start=0.5)
    second.add("epoch", step=10, compute=2.0, validation=0.75, callbacks=0.25)
    second.add("end", step=10, status="finished", other=0.5)
    second.add("now", step=0, compute=1.0, input=1.0)  # the test data are evaluated
    goodput = goodput_of(lines)
    assert goodput is not None
    assert (goodput.steps, goodput.repeated_steps, goodput.attempts) == (10, 2, 2)
    assert goodput.seconds == pytest.approx(
        {
            # Of the first attempt's last line one of three steps counts; what it communicated was waiting.
            "productive": 2.5 + 0.25 + 2.25 / 3 + 5.0,
            "start": 0.25 + 4.75 + 2.25,
            "tracing": 0.5 + 1.0 + 0.25 + 0.5,
            "input": 1.0 + 0.25 / 3,
            "waiting": 0.25 + 0.5 / 3,
            "checkpoint": 0.125,
            "restore": 1.5,
            "repeated": 3.0 * 2 / 3 + 0.5,
            "restart": 16.0 - 14.625,
            "away": 0.0,
            "validation": 0.75,
            "callbacks": 0.25,
            "other": 2.5,
        }
    )
    assert goodput.wall_seconds == pytest.approx(second.now)
    assert goodput.share == pytest.approx(8.5 / second.now)
    record = goodput.as_record()
    assert sum(record["seconds"].values()) == pytest.approx(record["wall_seconds"], abs=1e-9)
    read = of_record(json.loads(json.dumps(record)))
    assert read is not None and read.seconds == pytest.approx(goodput.seconds, abs=1e-3)


def test_a_step_that_only_the_launcher_knows_of_is_repeated_too() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    Attempt(lines, 1, 16.0).add("begin", step=5, before=2.0, failed_at=BEGAN + 15.0, failed_step=9)
    goodput = goodput_of(lines)
    assert goodput is not None and (goodput.steps, goodput.repeated_steps) == (5, 4)
    assert goodput.wall_seconds == pytest.approx(18.0)


def test_an_older_checkpoint_also_takes_steps_of_earlier_attempts_back() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    second = Attempt(lines, 1, 16.0)
    second.add("begin", step=5, before=2.0, failed_at=BEGAN + 14.125, failed_step=7)
    second.add("steps", step=6, compute=1.0)
    Attempt(lines, 2, 20.0).add("begin", step=2, before=1.0, failed_at=BEGAN + 19.0, failed_step=6)
    goodput = goodput_of(lines)
    assert goodput is not None and (goodput.steps, goodput.repeated_steps) == (2, 2 + 3 + 1)
    assert goodput.seconds["productive"] == pytest.approx((2.5 + 0.25) / 2)
    assert goodput.wall_seconds == pytest.approx(21.0)


def test_a_checkpoint_after_the_last_line_makes_its_steps_count() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    Attempt(lines, 1, 16.0).add("begin", step=8, before=2.0, failed_at=BEGAN + 15.0, failed_step=9)
    goodput = goodput_of(lines)
    assert goodput is not None and (goodput.steps, goodput.repeated_steps) == (8, 1)
    assert goodput.wall_seconds == pytest.approx(18.0)


def test_a_spare_counts_from_the_failure_on() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    spare = Attempt(lines, 1, 10.0)
    spare.add("begin", step=5, before=1.0, other=5.0, failed_at=BEGAN + 15.125, failed_step=7)
    goodput = goodput_of(lines)
    assert goodput is not None and goodput.wall_seconds == pytest.approx(16.0)
    assert goodput.seconds["restart"] == 0.0
    assert goodput.seconds["start"] == pytest.approx(5.0 + 0.875)


def test_without_a_launcher_the_pause_is_restart() -> None:
    """Who started the program again, an hour later, does not know when it failed, and numbers no attempts."""
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    again = Attempt(lines, 0, 3600.0)
    again.add("begin", step=5, before=2.0)
    goodput = goodput_of(lines)
    assert goodput is not None and goodput.wall_seconds == pytest.approx(3602.0)
    assert goodput.seconds["restart"] == pytest.approx(3600.0 - 14.125)
    assert (goodput.repeated_steps, goodput.attempts) == (2, 2)


def test_an_attempt_that_wrote_nothing_is_part_of_the_restart() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    third = Attempt(lines, 2, 30.0)
    third.add("begin", step=5, before=2.0, failed_at=BEGAN + 29.0, failed_step=0)
    goodput = goodput_of(lines)
    assert goodput is not None and goodput.seconds["restart"] == pytest.approx(30.0 - 14.125)
    assert goodput.wall_seconds == pytest.approx(32.0)

    lines = []
    Attempt(lines, 1, 5.0).add("begin", step=0, before=1.0, job_began=BEGAN)
    goodput = goodput_of(lines)
    assert goodput is not None and goodput.seconds["restart"] == pytest.approx(5.0)


def test_after_a_preemption_nothing_is_repeated() -> None:
    lines: list[dict[str, Any]] = []
    first = Attempt(lines, 0, 0.0)
    first.add("begin", step=0, before=1.0)
    first.add("steps", step=6, compute=6.0)
    first.add("end", step=6, status="interrupted", checkpoint=0.5)
    second = Attempt(lines, 1, 10.0)
    second.add("begin", step=6, before=1.0, failed_at=BEGAN + 8.0, failed_step=6)
    goodput = goodput_of(lines)
    assert goodput is not None and (goodput.seconds["repeated"], goodput.repeated_steps) == (0.0, 0)
    assert goodput.seconds["restart"] == pytest.approx(2.5)
    assert goodput.seconds["productive"] == pytest.approx(6.0)


def test_a_clock_that_is_set_back_loses_nothing_and_makes_nothing_negative() -> None:
    lines: list[dict[str, Any]] = []
    killed_at_7(lines)
    second = Attempt(lines, 1, 16.0, jump=-3600.0)
    second.add("begin", step=5, before=2.0, failed_at=BEGAN + 14.625, failed_step=7)
    second.add("steps", step=9, compute=4.0)
    goodput = goodput_of(lines)
    assert goodput is not None and min(goodput.seconds.values()) >= 0.0
    assert goodput.wall_seconds == pytest.approx(14.125 + 6.0)  # all but the pause, which no clock has seen
    assert (goodput.steps, goodput.repeated_steps) == (9, 2)


def test_a_second_fit_goes_on_and_a_later_run_of_a_process_begins_with_itself() -> None:
    lines: list[dict[str, Any]] = []
    attempt = Attempt(lines, 0, 0.0)
    attempt.add("alarm", step=0, compute=50.0, other=50.0)  # an earlier run
    opened = lines.pop()["elapsed"]
    attempt.add("begin", step=0, start=1.0, other=0.5, opened=opened, job_began=BEGAN)
    attempt.add("steps", step=10, compute=10.0)
    attempt.add("end", step=10, status="finished", checkpoint=0.25)
    attempt.add("begin", step=10, compute=2.0, start=0.5, checkpoint=0.25, opened=attempt.spent)
    attempt.add("steps", step=20, compute=10.0)
    goodput = goodput_of(lines)
    assert goodput is not None and goodput.wall_seconds == pytest.approx(24.5)
    assert goodput.seconds["productive"] == 20.0
    assert goodput.seconds["other"] == 2.0
    assert (goodput.steps, goodput.repeated_steps, goodput.attempts) == (20, 0, 1)


def test_a_process_that_finds_its_training_complete_repeats_nothing() -> None:
    lines: list[dict[str, Any]] = []
    first = Attempt(lines, 0, 0.0)
    first.add("begin", step=0, before=1.0)
    first.add("end", step=10, compute=10.0, status="finished")
    second = Attempt(lines, 1, 15.0)
    second.add("end", step=0, status="finished", before=2.0, checkpoint=0.5)
    second.add("now", step=0, compute=1.0)
    goodput = goodput_of(lines)
    assert goodput is not None and (goodput.steps, goodput.repeated_steps) == (10, 0)
    assert goodput.seconds["productive"] == 10.0
    assert goodput.wall_seconds == pytest.approx(18.5)


def test_what_is_not_known_or_not_valid_is_no_goodput() -> None:
    assert goodput_of([]) is None
    assert goodput_of([{"kind": "begin", "time": BEGAN}, {"kind": "steps", "time": BEGAN, "step": 1}]) is None
    wild = [
        {"kind": kind, "time": at, "step": step, "elapsed": {"compute": seconds, "waiting": -5, "start": "x"}}
        for kind, at, step, seconds in (
            ("begin", BEGAN, -3, 1e300),
            ("steps", BEGAN - 1e9, 10**400, None),
            ("end", BEGAN, [], 5.0),
            ("begin", BEGAN, 1, float("inf")),
        )
    ]
    goodput = goodput_of(wild)
    assert goodput is not None and min(goodput.seconds.values()) >= 0.0
    whole = Goodput(dict.fromkeys(KINDS, 1.0), 3, 0, 1).as_record()
    assert of_record(whole) is not None
    for broken in (
        None,
        [],
        {**whole, "steps": -1},
        {**whole, "attempts": "1"},
        {**whole, "seconds": {**whole["seconds"], "other": -1.0}},
        {**whole, "seconds": {"productive": 1.0}},
    ):
        assert of_record(broken) is None


def test_lines_are_read_one_by_one_and_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "begin", "time": 1.0}\nnonsense\n[]\n{"kind": "end", "time": 2.0}\n{"kin')
    assert [event["kind"] for event in read_events(path)] == ["begin", "end"]
    with pytest.raises(OSError):
        list(read_events(tmp_path / "missing"))


def test_a_process_began_before_its_clock_and_belongs_to_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = GivenClock()
    measured = TrainingClock(clock)
    monkeypatch.setattr(elapsed_module, "clock", measured)
    monkeypatch.setattr(elapsed_module, "_runs", [])
    elapsed_module._start.cache_clear()
    clock.pass_by(0.5)
    spent = elapsed()
    assert spent["other"] == 0.5
    assert process_began() == pytest.approx(time.time() - spent["before"] - 0.5, abs=60.0)
    assert process_began() == process_began()
    assert run_begins(tmp_path / "first") is None
    assert run_begins(tmp_path / "second") == elapsed()
    assert run_begins(tmp_path / "first") is None
    elapsed_module._start.cache_clear()


@pytest.mark.parametrize("steps", [10, None], ids=["known length", "unknown length"])
def test_the_first_line_says_from_which_step_training_resumes(
    steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_JOB_BEGAN", "1760000000.5")
    monkeypatch.setenv("DTRAIN_LAST_FAILURE", "1760000100.25:27")
    monkeypatch.setattr(event_log.clock, "resumed", events.TrainingResumes(25, 5))
    log = event_log.EventLog(tmp_path / "events.jsonl", {"strategy": "", "replicas": 1, "workers": 1})
    log.set_params({"epochs": 3, "steps": steps})
    log.on_epoch_begin(2)
    log._handle_fit_ends(events.FitEnds("finished"))
    begin, end = read_events(tmp_path / "events.jsonl")
    assert (begin["step"], end["step"]) == (25, 25)
    assert (begin["job_began"], begin["failed_at"], begin["failed_step"]) == (BEGAN + 0.5, BEGAN + 100.25, 27)
    assert begin["process"] == end["process"]
    for text in ("", "now", "nan:1", "-1:1", "1e300:1", "1:", "1:-1", "1:" + "9" * 5000):
        monkeypatch.setenv("DTRAIN_LAST_FAILURE", text)
        monkeypatch.setenv("DTRAIN_JOB_BEGAN", text)
        assert (settings.last_failure(), settings.job_began()) == (None, None)


def test_waiting_is_counted_where_it_was_measured() -> None:
    clock = GivenClock()
    measured = TrainingClock(clock)

    def step(*, waiting: float | None, usual: bool = True, communication: float | None = None) -> None:
        measured._handle_input_begins(events.InputBegins("data"))
        measured._handle_step_begins(events.StepBegins())
        clock.pass_by(1.0)
        measured._handle_steps_end(events.StepsEnd(usual=usual, waiting=waiting, communication=communication))

    measured._handle_loop_begins(events.LoopBegins("fit", ""))
    step(waiting=0.5, usual=False)
    step(waiting=0.25, communication=0.75)
    step(waiting=None)
    measured._handle_part_begins(events.PartBegins("communication", "communication"))
    clock.pass_by(2.0)
    measured._handle_part_ends(events.PartEnds("communication", ""))
    measured._handle_part_begins(events.PartBegins("checkpoint", "checkpoint"))
    measured._handle_part_begins(events.PartBegins("communication", "communication"))
    clock.pass_by(4.0)
    measured._handle_part_ends(events.PartEnds("communication", ""))
    measured._handle_part_ends(events.PartEnds("checkpoint", ""))
    assert measured.waiting == 2.25
    assert measured.seconds()["communication"] == 2.75
    measured._handle_training_resumes(events.TrainingResumes(7, 2))
    assert measured.resumed == (7, 2)
    measured._handle_loop_ends(events.LoopEnds("fit", ""))
    measured._handle_loop_begins(events.LoopBegins("fit", ""))
    assert measured.resumed is None


def test_what_other_workers_of_a_quorum_did_not_do_is_taken_from_the_productive_part() -> None:
    whole = Goodput({**dict.fromkeys(KINDS, 0.0), "productive": 8.0, "start": 2.0}, 10, 0, 1)
    less = whole.without(3.0)
    assert (less.share, less.lost, less.wall_seconds) == (0.5, {"away": 3.0, "start": 2.0}, 10.0)
    assert whole.without(9.0).share == 0.0
    entry = whole.as_record()
    del entry["seconds"]["away"]  # as earlier versions wrote it
    assert of_record(entry) == whole
