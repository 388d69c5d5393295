"""What a process records about itself, and what it reports to its launcher."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from dtrain.task import channel
from dtrain.task.channel import Listener
from dtrain.task.progress import ProgressReporter, StepMeans
from dtrain.task.task_messages import Message, Progress
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import Totals, TrainingClock
from given_clock import GivenClock


@pytest.fixture
def clock() -> GivenClock:
    """The time of this process."""
    return GivenClock()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, clock: GivenClock) -> ProgressReporter:
    """This process has done nothing yet; gives what it would report."""
    monkeypatch.setattr(events, "_always", {})
    training_clock = TrainingClock(clock)
    events.listen_always(training_clock)
    reporter = ProgressReporter(training_clock)
    events.listen_always(reporter)
    return reporter


def step(waiting: float | None = None) -> None:
    events.emit(events.StepBegins())
    events.emit(events.StepsEnd(waiting=waiting))
    events.emit(events.CallEnds(train=True))


def test_the_seconds_of_a_step_go_where_they_were_spent(fresh: ProgressReporter, clock: GivenClock) -> None:
    data = object()
    with events.loop("fit"):
        for _ in range(2):
            events.emit(events.InputBegins(data))
            assert fresh.phase == "input"
            clock.pass_by(0.5)
            events.emit(events.StepBegins())
            assert fresh.phase == "step"
            clock.pass_by(2.0)
            events.emit(events.StepsEnd(waiting=1.5))
            clock.pass_by(0.25)
            events.emit(events.CallEnds(train=True))
            clock.pass_by(4.0)
            with events.part("callbacks", "Saver"), events.waiting_for_others():
                assert fresh.phase == "step"
                clock.pass_by(8.0)
            assert fresh.phase == "callbacks"
    assert fresh._clock.totals == Totals(2, 1.0, 4.0, 3.0, 8.5, 4.0, True)
    assert fresh._clock.mark().named == {"Saver": 16.0} and fresh._clock.part_of("Saver") == "callbacks"


def test_a_pause_between_two_epochs_is_no_part_of_a_step(fresh: ProgressReporter, clock: GivenClock) -> None:
    with events.loop("fit"):
        for data in (object(), object()):
            events.emit(events.InputBegins(data))
            step()
            clock.pass_by(50.0)
    assert fresh._clock.totals.steps == 2 and fresh._clock.totals.between == 0.0


def test_what_begins_inside_of_fit_ends_there(fresh: ProgressReporter) -> None:
    with events.loop("fit"):
        assert fresh.phase == "callbacks"
        with events.loop("evaluate"):
            assert fresh.phase == "evaluate"
            events.emit(events.StepsEnd(train=False))
        assert (fresh.phase, fresh.step, fresh.done) == ("callbacks", 0, 1)
        with events.loop("fit"):
            step()
            assert fresh._clock.trained.steps == 1
        assert fresh._clock.trained.steps == 0
    assert fresh.phase == "idle"


def test_steps_count_from_the_optimizers_number_and_once(
    fresh: ProgressReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.task.channel.connected", lambda: True)
    monkeypatch.setattr(fresh, "_start", lambda: None)
    with events.loop("fit", lambda: 120):
        events.emit(events.BetweenSteps(0))
        for done in (1, 2):
            events.emit(events.InputBegins(None))
            step()
            events.emit(events.BetweenSteps(done))
        events.emit(events.BetweenSteps(2))  # again, at the end of data of unknown length
        assert (fresh.step, fresh.done) == (122, 2)
        events.emit(events.BetweenSteps(3))  # of a function that emits nothing itself
        assert (fresh.step, fresh.done) == (123, 3)
    with events.loop("fit", lambda: 0):
        events.emit(events.TrainingResumes(200))  # a checkpoint knows better
        events.emit(events.InputBegins(None))
        step()
        assert fresh.step == 201


def test_means_are_over_enough_steps_and_enough_time() -> None:
    usual = StepMeans()
    found = [
        usual.after(float(number), Totals(number * 10, stepping=number * 1.0, measured=True))[0]
        for number in range(8)
    ]
    assert found == [None] * 5 + [0.1] * 3
    slow = StepMeans()
    found = [slow.after(n * 6.0, Totals(n, stepping=n * 6.0))[0] for n in range(4)]
    assert found == [None, None, 6.0, 6.0]


PROGRAM = """
import sys, threading
from dtrain.task import progress
from dtrain.telemetry import events
def stuck():
    sys.stdin.readline()
with events.loop("fit"):
    events.emit(events.TrainingResumes(40))
    events.emit(events.StepsEnd())
    with events.part("checkpoint"):
        print("ready", flush=True)
        stuck()
sys.stdin.readline()
"""


@pytest.fixture
def task() -> Iterator[tuple[subprocess.Popen[str], queue.SimpleQueue[Message]]]:
    """A process that reports, without TensorFlow."""
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    listener = Listener(heard.put)
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, channel.VARIABLE: listener.address},
        pass_fds=[listener.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield child, heard
    child.kill()
    child.communicate()
    listener.close()


def test_progress_is_reported_at_once_and_no_progress_every_second(
    fresh: ProgressReporter, clock: GivenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    listener = Listener(heard.put)
    monkeypatch.setenv(channel.VARIABLE, listener.address)
    for seconds in (0.0, 0.9, 0.2, 0.9):
        clock.pass_by(seconds)
        fresh.report()
    for fresh.step in (7, 8):
        fresh.report()
    found: list[int] = []
    while not found or found[-1] != 8:
        message = heard.get()
        assert isinstance(message, Progress)
        found.append(message.step)
    assert found == [0, 0, 7, 8]
    listener.close()


def test_a_launcher_hears_without_progress_too_and_gets_stacks(
    task: tuple[subprocess.Popen[str], queue.SimpleQueue[Message]],
) -> None:
    child, heard = task
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"

    def until(phase: str) -> Progress:
        while True:
            found = heard.get()
            assert isinstance(found, Progress)
            if found.phase == phase:
                return found

    found = until("checkpoint")
    assert (found.pid, found.step, found.done, found.train) == (child.pid, 41, 1, True)
    until("checkpoint")  # nothing new: a sign of life
    os.kill(child.pid, signal.SIGUSR2)
    child.stdin.write("\n")
    child.stdin.flush()
    assert until("idle").step == 41
    child.stdin.close()
    child.stdin = None
    _, errors = child.communicate()
    assert "in stuck" in errors
    assert "dtrain/task/progress.py" in errors  # all threads
    assert child.returncode == 0
