"""When workers exchange proposals to save: often enough from the first step on, and not at every step."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.checkpoint.coordinator import SaveCoordinator
from dtrain.interfaces.replica_layout import ReplicaLayout
from given_clock import GivenClock


class Peers:
    """The proposals of this worker, with another that proposes the same; time passes by hand."""

    def __init__(self) -> None:
        self.proposals: list[Any] = []
        self.clock = GivenClock()

    def exchange(self, layout: ReplicaLayout, proposal: Any) -> list[Any]:
        self.proposals.append(proposal)
        return [proposal] * layout.workers

    def coordinator(self, every: int | None, total: int) -> SaveCoordinator:
        return SaveCoordinator(
            ReplicaLayout(workers=2),
            every=every,
            seconds=None,
            total=total,
            exchange=self.exchange,
            clock=self.clock,
        )


@pytest.fixture
def peers() -> Peers:
    return Peers()


def test_how_long_steps_take_is_not_guessed_before_one_was_made(peers: Peers) -> None:
    """The first exchange may come soon after the start."""
    found = peers.coordinator(every=None, total=7)
    found.decide(7, busy=False, notice="")
    peers.clock.pass_by(0.2)
    assert not found.decide(8, busy=False, notice="").notice
    assert len(peers.proposals) == 2
    assert peers.proposals[1].step_seconds == pytest.approx(0.2)
    # Half a second's worth of such steps, two at most, until the next exchange.
    assert found.decide(10, busy=False, notice="the end is near").notice == "the end is near"


def test_short_steps_are_many_between_two_exchanges(peers: Peers) -> None:
    found = peers.coordinator(every=None, total=0)
    for total in range(200):
        peers.clock.pass_by(0.001)
        found.decide(total, busy=False, notice="")
    assert len(peers.proposals) < 20


def test_a_number_of_steps_that_is_up_causes_an_exchange(peers: Peers) -> None:
    found = peers.coordinator(every=8, total=0)
    saves = []
    for total in range(1, 30):
        if found.decide(total, busy=False, notice="").save:
            found.saved(total)
            saves.append(total)
    assert saves == [8, 16, 24]
