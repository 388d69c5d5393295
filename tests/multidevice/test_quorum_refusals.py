"""Programs that a job with a quorum refuses, and programs that ask for a quorum without one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import dtrain
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError
from dtrain.gradient_hooks.local_sgd import LocalSGD
from dtrain.strategies.quorum_workers import check_one_device, quorum_of

TOPOLOGY = Topology({"worker": ("127.0.0.1:1001", "127.0.0.1:1002")}, "worker", 0)
NAME = "MultiWorkerMirroredStrategy"


@pytest.mark.parametrize(
    ("hook", "strategy", "by_program", "problem"),
    [
        (None, NAME, False, "has no gradient hook"),
        (dtrain.PowerSGD(2), NAME, False, "has the gradient hook PowerSGD"),
        (dtrain.DiLoCo(), "FullyShardedStrategy", False, "its FullyShardedStrategy"),
        (dtrain.DiLoCo(quorum=3), NAME, False, "has quorum=3, but the job was started with --quorum 2"),
        (dtrain.DiLoCo(fragments=2), NAME, False, "fragments=2"),
        (dtrain.DiLoCo(overlap=1), NAME, False, "overlap=1"),
        (LocalSGD(8), NAME, True, "cluster resolver"),
    ],
)
def test_what_has_no_rounds_for_a_quorum_is_refused(
    monkeypatch: pytest.MonkeyPatch, hook: Any, strategy: str, by_program: bool, problem: str
) -> None:
    monkeypatch.setenv("DTRAIN_QUORUM", "2@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=problem):
        quorum_of(TOPOLOGY, hook, strategy, by_program=by_program)


def test_a_quorum_without_a_job_that_has_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="LocalSGD has quorum=2, but the job was not started"):
        dtrain.MultiWorkerMirroredStrategy(gradient_hook="local_sgd:quorum=2")
    with pytest.raises(ConfigurationError, match="quorum is 0"):
        dtrain.DiLoCo(quorum=0)
    with pytest.raises(ConfigurationError, match="has 2 devices"):
        check_one_device(2)


def test_a_strategy_without_rounds_trains_nothing_in_such_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with dtrain.OneDeviceStrategy("/cpu:0").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    monkeypatch.setenv("DTRAIN_QUORUM", "2@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="has no rounds"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
