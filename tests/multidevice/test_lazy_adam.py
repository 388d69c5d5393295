"""`LazyAdam` gives the same numbers on one device and on several replicas."""

from __future__ import annotations

import pytest

import dtrain
from dtrain.optim import LazyAdam
from parameter_server_cases.splits import compared


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_lazy_adam_on_two_replicas(name: str) -> None:
    strategy = dtrain.strategy(name)
    assert strategy.num_replicas_in_sync == 2
    compared(strategy, lambda: LazyAdam(0.01))
