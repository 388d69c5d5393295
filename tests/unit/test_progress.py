"""What a process notes of itself, and what its launcher hears of it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from dtrain import channel, progress
from dtrain.channel import Listener, Message, Progress


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has done nothing yet."""
    monkeypatch.setattr(progress, "_now", progress._State())
    monkeypatch.setattr(progress, "_told", (0, 0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass, by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_the_seconds_of_a_step_go_where_they_were_spent(clock: Callable[[float], None]) -> None:
    progress.begin("fit")
    data = object()
    for _ in range(2):
        progress.input_begins(data)
        clock(0.5)
        reading = progress.step_begins()
        assert reading == 0.5
        clock(2.0)
        progress.step_ends(reading, 1.5, train=True)
        clock(0.25)
        progress.call_ends(train=True)
        clock(4.0)
        with progress.waiting():
            assert progress._now.phase == "step"
            clock(8.0)
        assert progress._now.phase == "callbacks"
    assert progress._now.totals == progress.Totals(2, 1.0, 4.0, 3.0, 8.5, 4.0, True)


def test_a_pause_between_two_epochs_is_no_part_of_a_step(clock: Callable[[float], None]) -> None:
    progress.begin("fit")
    for data in (object(), object()):
        progress.input_begins(data)
        progress.step_ends(progress.step_begins(), None, train=True)
        progress.call_ends(train=True)
        clock(50.0)
    assert progress._now.totals.between == 0.0


def test_what_begins_inside_of_fit_ends_there() -> None:
    progress.begin("fit")
    progress.begin("evaluate")
    assert progress._now.phase == "evaluate"
    progress.step_ends(0.0, None, train=False)
    progress.end()
    assert (progress._now.phase, progress._now.kinds, progress._now.done) == ("callbacks", ("fit",), 1)
    progress.end()
    assert progress._now.phase == "idle"


def test_steps_count_from_the_optimizers_number_and_once() -> None:
    progress.begin("fit")
    progress.step_done(0)
    assert progress.needs_step()
    progress.training_from(120)
    assert not progress.needs_step()
    for done in (1, 2):
        progress.step_ends(0.0, None, train=True)
        progress.step_done(done)
    progress.step_done(2)  # again, at the end of data of unknown length
    assert (progress._now.step, progress._now.done) == (122, 2)
    progress.step_done(3)  # of a function that notes nothing itself
    assert (progress._now.step, progress._now.done) == (123, 3)


def test_means_are_over_enough_steps_and_enough_time() -> None:
    usual = progress._Usual()
    found = [
        usual.after(float(number), progress.Totals(number * 10, stepping=number * 1.0, measured=True))[0]
        for number in range(8)
    ]
    assert found == [None] * 5 + [0.1] * 3
    slow = progress._Usual()
    found = [slow.after(n * 6.0, progress.Totals(n, stepping=n * 6.0))[0] for n in range(4)]
    assert found == [None, None, 6.0, 6.0]


PROGRAM = """
import sys, threading
from dtrain import progress
progress.begin("fit")
progress.training_from(40)
progress.step_ends(0.0, None, train=True)
progress.phase("checkpoint")
print("ready", flush=True)
def stuck():
    sys.stdin.readline()
stuck()
progress.end()
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


def test_a_launcher_hears_at_once_then_every_second_and_gets_stacks(
    task: tuple[subprocess.Popen[str], queue.SimpleQueue[Message]],
) -> None:
    child, heard = task
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"

    def until(phase: str) -> Progress:
        while True:
            found = heard.get(timeout=10)
            assert isinstance(found, Progress)
            if found.phase == phase:
                return found

    found = until("checkpoint")
    assert (found.pid, found.step, found.done, found.train) == (child.pid, 41, 1, True)
    begin = time.monotonic()
    until("checkpoint")
    assert time.monotonic() - begin > 0.5  # nothing new: a sign of life
    os.kill(child.pid, signal.SIGUSR2)
    child.stdin.write("\n")
    child.stdin.flush()
    assert until("idle").step == 41
    child.stdin.close()
    child.stdin = None
    _, errors = child.communicate(timeout=20)
    assert "in stuck" in errors
    assert "dtrain/progress.py" in errors  # all threads
    assert child.returncode == 0
