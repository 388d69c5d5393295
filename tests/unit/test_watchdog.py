"""Who is to blame for a job that does not go on, or is slow: by the reports alone, on a given clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from dtrain.environments.topology import Task
from dtrain.launch.local_processes.local_process import is_stopped
from dtrain.launch.supervision.watchdog import Diagnosis, Watchdog
from dtrain.task.task_messages import Progress
from given_clock import GivenClock
from processes import wait_until

CHIEF, OTHER = Task("worker", 0), Task("worker", 1)


class Job:
    """Tasks that report, and a watchdog that is asked whenever it wants to be."""

    def __init__(self, hang_timeout: float | None = None, tasks: int = 2) -> None:
        self.clock = GivenClock()
        self.tasks = [Task("worker", index) for index in range(tasks)]
        self.stopped: set[int] = set()
        self.silent: set[Task] = set()
        self.reports: dict[Task, Progress] = {}
        self.verdicts: list[tuple[float, Diagnosis]] = []
        self.watchdog = Watchdog(hang_timeout, self.clock, lambda task, pid: pid in self.stopped)
        for task in self.tasks:
            self.watchdog.on_start(task, 100 + task.index)

    @property
    def now(self) -> float:
        return self.clock.now()

    def tell(
        self,
        task: Task,
        step: int,
        phase: str = "step",
        each: float | None = None,
        own: float | None = None,
        *,
        done: int | None = None,
        parts: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.reports[task] = Progress(
            task,
            100 + task.index,
            step,
            phase,
            step if done is None else done,
            True,
            each,
            own,
            parts.get("reading"),
            parts.get("between"),
        )
        self.watchdog.on_progress(self.reports[task])

    def everybody(
        self, step: int, phase: str = "step", each: float | None = None, done: int | None = None
    ) -> None:
        for task in self.tasks:
            self.tell(task, step, phase, each, done=done)

    def wait(self, seconds: float) -> list[Diagnosis]:
        """Time passes: each task says every second that it is alive."""
        end = self.now + seconds
        before = len(self.verdicts)
        beat = self.now + 1
        while True:
            due = self.watchdog.next_check()
            moment = min(end, beat, max(self.now, due) if due is not None else end)
            self.clock.pass_by(moment - self.now)
            if moment >= beat:
                beat += 1
                for task, report in self.reports.items():
                    if task not in self.silent and 100 + task.index not in self.stopped:
                        self.watchdog.on_progress(report)
            if due is not None and moment >= due:
                diagnosis = self.watchdog.check()
                if diagnosis is not None:
                    self.verdicts.append((self.now, diagnosis))
            if moment >= end:
                return [diagnosis for _, diagnosis in self.verdicts[before:]]


def test_a_task_in_a_callback_while_the_other_waits_is_named_once() -> None:
    job = Job()
    job.everybody(119, each=0.03)
    job.wait(0.2)
    job.tell(CHIEF, 120, "step", 0.03)
    job.tell(OTHER, 120, "callbacks", 0.03)
    began = job.now
    (diagnosis,) = job.wait(100)
    assert diagnosis == Diagnosis(
        "hung",
        OTHER,
        "worker 1 has made no progress for 30 s: it is in a callback while the others wait for it, "
        "at step 120; usual step 0.03 s",
    )
    assert 30 <= job.verdicts[0][0] - began <= 30.1


def test_a_given_timeout_holds_exactly() -> None:
    job = Job(hang_timeout=5)
    job.everybody(1)
    job.wait(4)
    job.everybody(2)
    assert job.wait(4.9) == []
    job.tell(OTHER, 3, "input")
    assert job.wait(4.9) == []
    (diagnosis,) = job.wait(0.3)
    assert (diagnosis.kind, diagnosis.task) == ("hung", OTHER)
    assert "it waits for its next batch" in diagnosis.line


@pytest.mark.parametrize(("each", "limit"), [(0.01, 30), (3.5, 35), (20.0, 200)])
def test_the_limit_follows_the_usual_step(each: float, limit: float) -> None:
    job = Job()
    job.everybody(5, each=each)
    assert job.wait(limit - 0.1) == []
    assert len(job.wait(0.3)) == 1


def test_the_limit_is_twice_the_longest_pause_that_the_job_survived() -> None:
    job = Job()
    job.everybody(5)
    job.wait(25)
    job.everybody(6, "evaluate")
    assert job.wait(49.9) == []
    assert len(job.wait(0.2)) == 1


def test_a_pause_outside_of_fit_is_not_watched_and_not_counted() -> None:
    job = Job()
    job.everybody(5)
    job.everybody(5, "idle")
    assert job.watchdog.next_check() is None
    assert job.wait(5000) == []
    job.everybody(6)
    assert job.wait(29.9) == []
    assert len(job.wait(0.2)) == 1


def test_the_first_step_of_a_life_may_take_ten_minutes() -> None:
    job = Job(hang_timeout=5)
    job.everybody(120, "callbacks", done=0)
    assert job.wait(599) == []
    job.everybody(121, done=1)
    assert job.wait(4.9) == []
    assert len(job.wait(0.2)) == 1


def test_a_first_step_that_never_ends_is_a_hang() -> None:
    job = Job(hang_timeout=5)
    job.everybody(120, "step", done=0)
    job.tell(OTHER, 120, "callbacks", done=0)
    (diagnosis,) = job.wait(601)
    assert diagnosis.task == OTHER
    assert "(the first that this process makes)" in diagnosis.line


def test_a_new_life_may_take_ten_times_as_long_as_the_first_step_did() -> None:
    job = Job()
    job.everybody(0)
    job.wait(100)
    job.everybody(1)
    for task in job.tasks:
        job.watchdog.on_exit(task)
        job.watchdog.on_start(task, 100 + task.index)
    job.reports.clear()
    job.everybody(1, done=0)
    assert job.wait(999) == []
    assert len(job.wait(2)) == 1


def test_a_task_outside_of_fit_that_the_others_wait_for_has_time() -> None:
    """It may be evaluating in its own way, which nobody can see."""
    job = Job(hang_timeout=5)
    job.everybody(7)
    job.tell(OTHER, 7, "idle")
    assert job.wait(599) == []
    (diagnosis,) = job.wait(2)
    assert diagnosis.task == OTHER
    assert "it is outside of fit" in diagnosis.line


def test_a_stopped_process_is_named_whatever_it_was_doing() -> None:
    job = Job(hang_timeout=5, tasks=3)
    job.everybody(7)
    job.tell(CHIEF, 7, "callbacks")
    job.stopped.add(101)
    (diagnosis,) = job.wait(6)
    assert diagnosis.task == OTHER
    assert (
        diagnosis.line
        == "worker 1 has made no progress for 5 s: its process is stopped (SIGSTOP), last heard of "
        "at step 7"
    )


def test_a_process_that_is_stopped_in_its_first_step_does_not_have_ten_minutes() -> None:
    job = Job(hang_timeout=5)
    job.everybody(0)
    job.stopped.add(100)
    (diagnosis,) = job.wait(6)
    assert diagnosis.task == CHIEF


def test_a_process_that_reports_no_more_is_named() -> None:
    job = Job(hang_timeout=5)
    job.everybody(7)
    job.silent.add(OTHER)
    (diagnosis,) = job.wait(6)
    assert diagnosis.task == OTHER
    assert "does not answer" in diagnosis.line


def test_else_the_one_that_is_behind_is_named() -> None:
    job = Job(hang_timeout=5, tasks=3)
    job.everybody(7)
    job.tell(CHIEF, 8)
    job.tell(Task("worker", 2), 8)
    (diagnosis,) = job.wait(6)
    assert diagnosis.task == OTHER


def test_where_nothing_tells_all_are_shown() -> None:
    job = Job(hang_timeout=5)
    job.everybody(7)
    (diagnosis,) = job.wait(6)
    assert diagnosis.task == CHIEF
    assert "which one is the cause (worker 0 is in a step, worker 1 is in a step)" in diagnosis.line


def test_a_task_that_ended_is_mentioned() -> None:
    job = Job(hang_timeout=5, tasks=3)
    job.everybody(7)
    job.watchdog.on_exit(OTHER)
    del job.reports[OTHER]
    (diagnosis,) = job.wait(6)
    assert "worker 1 ended before" in diagnosis.line


def test_a_job_alone() -> None:
    job = Job(hang_timeout=5, tasks=1)
    job.everybody(7)
    (diagnosis,) = job.wait(6)
    assert diagnosis.line.endswith("it is in a step, or reading its data, at step 7")


@pytest.mark.parametrize("stopped", [4.5, 3600.0])
def test_a_launcher_that_was_stopped_itself_blames_nobody(stopped: float) -> None:
    """At most a second of the time counts in which it was stopped."""
    job = Job(hang_timeout=5)
    job.everybody(7)
    job.wait(1)
    job.clock.pass_by(stopped)
    assert job.watchdog.check() is None
    assert job.wait(2.9) == []
    job.everybody(8)
    # Nor does it take its own pause for one of the job's.
    assert len(job.wait(5.1)) == 1


def test_a_launcher_that_is_stopped_again_and_again_finds_a_hang_nevertheless() -> None:
    job = Job(hang_timeout=5)
    job.everybody(7)
    found = []
    for _ in range(10):
        found += job.wait(1)
        job.clock.pass_by(60)
    assert [diagnosis.kind for diagnosis in found] == ["hung"]


def test_the_pause_of_the_launcher_is_none_of_the_job() -> None:
    job = Job()
    job.everybody(7)
    job.wait(1)
    job.clock.pass_by(3600)
    job.everybody(8)
    assert job.wait(29.9) == []
    assert len(job.wait(0.3)) == 1


def test_tasks_that_report_nothing_are_not_judged() -> None:
    job = Job(hang_timeout=5)
    assert job.watchdog.next_check() is None
    assert job.wait(1000) == []


def test_the_watchdog_asks_to_be_called_in_time_and_not_all_the_time() -> None:
    job = Job(hang_timeout=5)
    job.everybody(7)
    for _ in range(100):
        due = job.watchdog.next_check()
        assert due is not None
        assert due > job.now
        job.clock.pass_by(due - job.now)
        for task in job.tasks:
            job.watchdog.on_progress(job.reports[task])
        job.watchdog.check()
    assert job.now > 1000 + 90


SLOW_LINES = [
    ({"reading": 0.095}, "0.095 s of it is waiting for its next batch"),
    ({"reading": 0.001, "between": 0.001}, "0.098 s of it is computing"),
    ({"between": 0.09}, "0.09 s of it is in callbacks"),
]


@pytest.mark.parametrize(("parts", "ending"), SLOW_LINES)
def test_a_slow_task_is_named_once_until_it_recovers(parts: dict[str, float], ending: str) -> None:
    job = Job()
    for step in range(1, 20):
        job.tell(CHIEF, step, "step", 0.1, own=0.01)
        job.tell(OTHER, step, "step", 0.1, own=0.1, parts=parts)
        job.wait(1)
    ((_, diagnosis),) = job.verdicts
    assert (diagnosis.kind, diagnosis.task) == ("slow", OTHER)
    assert diagnosis.line == (
        "worker 1 is slow, and the others wait for it: its own part of a step takes 0.1 s, that of the "
        f"others 0.01 s, 10.0 times as long; {ending}"
    )
    job.tell(OTHER, 20, "step", 0.02, own=0.015)
    job.wait(20)
    job.tell(OTHER, 21, "step", 0.1, own=0.1, parts=parts)
    assert job.wait(20) == []  # it comes and goes: once was enough
    job.tell(OTHER, 22, "step", 0.02, own=0.015)
    for step in range(23, 26):
        job.tell(OTHER, step, "step", 0.02, own=0.015)
        job.wait(15)
    job.tell(OTHER, 27, "step", 0.1, own=0.1, parts=parts)
    assert [diagnosis.kind for diagnosis in job.wait(8)] == ["slow"]


def test_one_long_batch_makes_nobody_slow() -> None:
    """It is in the means for some seconds, and then no more."""
    job = Job()
    for step in range(1, 6):
        job.tell(CHIEF, step, "step", 0.1, own=0.01)
        job.tell(OTHER, step, "step", 0.1, own=0.1)
        assert job.wait(1) == []
    job.tell(OTHER, 6, "step", 0.02, own=0.011)
    assert job.wait(20) == []


@pytest.mark.parametrize(
    ("own", "others", "step"),
    [(0.029, 0.01, 0.03), (0.0015, 0.0001, 0.002), (0.01, 0.001, 0.5)],
)
def test_what_is_not_slow(own: float, others: float, step: float) -> None:
    """Not three times as slow; too quick to matter; or lost in what the step takes anyway."""
    job = Job()
    for number in range(1, 20):
        job.tell(CHIEF, number, "step", step, own=others)
        job.tell(OTHER, number, "step", step, own=own)
        assert job.wait(1) == []


def test_a_process_is_seen_to_be_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(child.pid))
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: not is_stopped(child.pid))
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
