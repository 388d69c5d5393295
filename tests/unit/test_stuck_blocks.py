"""Which blocks count as stuck, on a given clock, without TensorFlow's workers."""

from __future__ import annotations

import itertools

import pytest

from dtrain.engine.parameter_server.runner import InFlightBlock
from dtrain.engine.parameter_server.stuck import StuckDetection
from given_clock import GivenClock

TIMEOUT = 60.0


class Runner:
    """The part of a `BlockRunner` that the detection reads."""

    def __init__(self) -> None:
        self.clock = GivenClock()
        self.in_flight: list[InFlightBlock] = []
        self.progress = 0
        self.step_seconds: float | None = None

    def begin(self, worker: int | None, steps: int = 1) -> None:
        self.in_flight.append(InFlightBlock(self.clock.now(), worker, steps))
        self.progress += 1


class Session:
    """A detection that is checked every half second."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.detection = StuckDetection(self.runner, TIMEOUT)  # type: ignore[arg-type]
        self.stuck: list[tuple[int, str]] = []
        self.idle: list[float] = []

    def run(self, seconds: float, gap: float = 0.5) -> None:
        """Checks for so long, every `gap` seconds."""
        for _ in range(round(seconds / gap)):
            self.runner.clock.pass_by(gap)
            stuck, idle = self.detection.check()
            self.stuck += stuck
            self.idle += [] if idle is None else [idle]


@pytest.fixture
def session() -> Session:
    return Session()


def test_a_block_that_takes_longer_than_the_limit_is_found_once(session: Session) -> None:
    session.runner.begin(1)
    session.run(TIMEOUT)
    assert session.stuck == []
    session.run(1.0)
    assert session.stuck == [(1, "it has been at work on 1 step for 60 s")]
    session.run(10 * TIMEOUT)
    assert len(session.stuck) == 1 and session.idle == []


def test_the_limit_of_a_slow_block_is_fifty_times_its_usual_time(session: Session) -> None:
    session.runner.step_seconds = 2.0
    session.runner.begin(0, steps=10)
    session.run(50 * 2.0 * 10)
    assert session.stuck == []
    session.run(1.0)
    assert session.stuck == [(0, "it has been at work on 10 steps for 1000 s")]


def test_every_block_has_its_own_limit(session: Session) -> None:
    session.runner.begin(0)
    for _ in range(5):
        session.run(TIMEOUT - 1)
        session.runner.in_flight.clear()  # it is done
        session.runner.begin(0)
    assert session.stuck == []
    session.run(TIMEOUT + 1)
    assert [worker for worker, _ in session.stuck] == [0]


def test_a_block_that_waits_for_a_worker_is_not_stuck_and_nothing_else_happens(session: Session) -> None:
    session.runner.begin(None)
    session.run(0.5)
    session.run(TIMEOUT)
    assert session.stuck == [] and session.idle == []
    session.run(0.5)
    assert session.idle == [TIMEOUT + 0.5]
    session.run(TIMEOUT + 0.5)
    assert session.idle == [TIMEOUT + 0.5] * 2


@pytest.mark.parametrize("what", ["a block is submitted", "a worker has a block"])
def test_whatever_happens_ends_the_time_without_progress(session: Session, what: str) -> None:
    for _ in range(3):
        session.run(TIMEOUT)
        if what == "a block is submitted":
            session.runner.begin(None)
            session.run(0.5)
        else:
            session.runner.begin(0)
            session.run(0.5)
            session.runner.in_flight.clear()
    assert session.idle == [] and session.stuck == []


@pytest.mark.parametrize("worker", [0, None])
def test_a_stop_of_this_process_is_no_time_of_its_workers(session: Session, worker: int | None) -> None:
    """The chief sees what its workers have done a moment after it goes on."""
    session.runner.begin(worker)
    session.run(1.0)
    session.run(36_000.0, gap=3600.0)
    assert session.stuck == [] and session.idle == []


@pytest.mark.parametrize("gap", [2.5, 60.0, 3600.0])
@pytest.mark.parametrize("worker", [0, None])
def test_stops_again_and_again_do_not_hide_a_stuck_block(
    session: Session, worker: int | None, gap: float
) -> None:
    session.runner.begin(worker)
    for checks in itertools.count(1):
        session.run(gap, gap)
        if session.stuck or session.idle:
            break
        assert checks < 2 * TIMEOUT
    assert checks > TIMEOUT / 2
