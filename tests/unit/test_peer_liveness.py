"""The rules of liveness between workers, at the shipped limits, on a given clock."""

from __future__ import annotations

import pytest

from dtrain.process_group.peer_liveness import CHECK_INTERVAL, PeerLiveness
from given_clock import GivenClock

ELSEWHERE, RUNS, STOPPED = None, True, False
PEER = 3


def liveness(runs: bool | None, clock: GivenClock) -> PeerLiveness:
    return PeerLiveness([PEER], lambda worker: runs, clock)


def seconds_until_lost(found: PeerLiveness, clock: GivenClock, *, gap: float, most: float) -> float | None:
    """When a silent peer is lost, if this process gets to a check every `gap` seconds; None within `most`."""
    begun = clock.now()
    while clock.now() - begun < most:
        clock.pass_by(gap)
        assert found.check_is_due()
        if found.is_lost(PEER):
            return clock.now() - begun
    return None


@pytest.mark.parametrize(("runs", "lost"), [(STOPPED, 8.0), (ELSEWHERE, 600.0), (RUNS, None)])
def test_who_is_silent_for_long(runs: bool | None, lost: float | None) -> None:
    """A stopped process of this machine is lost; a busy one is not; of another machine, nobody knows."""
    clock = GivenClock()
    assert seconds_until_lost(liveness(runs, clock), clock, gap=CHECK_INTERVAL, most=90_000.0) == lost


@pytest.mark.parametrize("runs", [STOPPED, ELSEWHERE])
def test_a_sign_of_life_ends_the_silence(runs: bool | None) -> None:
    clock = GivenClock()
    found = liveness(runs, clock)
    for _ in range(1000):
        assert seconds_until_lost(found, clock, gap=CHECK_INTERVAL, most=7.0) is None
        found.note_heard(PEER)
        assert found.silence(PEER) == 0.0


@pytest.mark.parametrize(("runs", "checks"), [(STOPPED, 8), (ELSEWHERE, 600)])
@pytest.mark.parametrize("gap", [1.5, 3.9, 4.1, 3600.0])
def test_however_often_this_process_is_stopped_a_silent_peer_is_lost(
    runs: bool | None, checks: int, gap: float
) -> None:
    """It is lost after as many checks as without stops: only the time in which this process ran counts."""
    clock = GivenClock()
    found = liveness(runs, clock)
    assert seconds_until_lost(found, clock, gap=gap, most=1000 * gap) == pytest.approx(checks * gap)


@pytest.mark.parametrize(("runs", "lost"), [(STOPPED, 8.0), (ELSEWHERE, 600.0)])
def test_stops_now_and_then_put_the_loss_off_by_their_own_time_only(runs: bool | None, lost: float) -> None:
    clock = GivenClock()
    found = liveness(runs, clock)
    begun, stopped = clock.now(), 0.0
    while not found.is_lost(PEER):
        for gap in (CHECK_INTERVAL, CHECK_INTERVAL, CHECK_INTERVAL, CHECK_INTERVAL + 30.0):
            clock.pass_by(gap)
            assert found.check_is_due()
            stopped += gap - CHECK_INTERVAL
            if found.is_lost(PEER):
                break
        assert clock.now() - begun < 100 * lost
    assert clock.now() - begun - stopped == pytest.approx(lost)


def test_a_stop_of_this_process_is_no_silence_of_its_peers() -> None:
    """A peer that was stopped together with this process has time to send its sign of life."""
    clock = GivenClock()
    found = liveness(STOPPED, clock)
    clock.pass_by(3600.0)
    assert found.silence(PEER) == CHECK_INTERVAL
    assert found.check_is_due()
    assert found.silence(PEER) == CHECK_INTERVAL and not found.is_lost(PEER)
    found.note_heard(PEER)
    assert found.silence(PEER) == 0.0


def test_a_peer_is_due_a_sign_of_life_two_seconds_after_the_last_frame() -> None:
    clock = GivenClock()
    found = liveness(RUNS, clock)
    for _ in range(3):
        clock.pass_by(1.9)
        assert not found.is_due(PEER)
        clock.pass_by(0.1)
        assert found.is_due(PEER)
        found.note_sent(PEER)
    clock.pass_by(3600.0)  # a stop of this process: its peers have heard nothing of it
    assert found.is_due(PEER)


def test_a_check_is_due_once_a_second() -> None:
    clock = GivenClock()
    found = liveness(RUNS, clock)
    assert not found.check_is_due()
    clock.pass_by(0.9)
    assert not found.check_is_due()
    clock.pass_by(0.1)
    assert found.check_is_due() and not found.check_is_due()
