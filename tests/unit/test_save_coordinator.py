"""When workers meet to decide on checkpoints: often enough from the first step on, and not at every one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dtrain.checkpoint import coordinator
from dtrain.checkpoint.coordinator import SaveCoordinator
from dtrain.keras_engine.protocol import ReplicaLayout


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The proposals of this worker, with another that proposes the same."""
    sent: list[Any] = []

    def exchange(layout: ReplicaLayout, proposal: Any) -> list[Any]:
        sent.append(proposal)
        return [proposal] * layout.workers

    monkeypatch.setattr(coordinator, "exchange", exchange)
    return sent


def test_how_long_steps_take_is_not_guessed_before_one_was_made(proposals: list[Any]) -> None:
    """However soon after its making it meets for the first time."""
    found = SaveCoordinator(ReplicaLayout(workers=2), every=None, seconds=None, total=7)
    found.decide(7, busy=False, notice="")
    time.sleep(0.2)
    assert not found.decide(8, busy=False, notice="").notice
    assert len(proposals) == 2
    assert 0.2 <= proposals[1].step_seconds < 5
    # Half a second's worth of such steps, two at most, until they meet again.
    assert found.decide(10, busy=False, notice="the end is near").notice == "the end is near"


def test_short_steps_are_many_between_two_meetings(proposals: list[Any]) -> None:
    found = SaveCoordinator(ReplicaLayout(workers=2), every=None, seconds=None, total=0)
    for total in range(200):
        time.sleep(0.001)
        found.decide(total, busy=False, notice="")
    assert len(proposals) < 20


def test_a_number_of_steps_that_is_up_is_a_meeting(proposals: list[Any]) -> None:
    found = SaveCoordinator(ReplicaLayout(workers=2), every=8, seconds=None, total=0)
    saves = []
    for total in range(1, 30):
        if found.decide(total, busy=False, notice="").save:
            found.saved(total)
            saves.append(total)
    assert saves == [8, 16, 24]
