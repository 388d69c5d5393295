"""Global batch = per-replica batch x accumulation x replicas."""

from __future__ import annotations

import pytest

from dtrain.base.batch_sizes import BatchSizes, plan_batches
from dtrain.errors import ConfigurationError
from refusals import refused


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (32, 1)),
        ({"accumulation": 3}, (32, 3)),
        ({"per_replica": 5}, (5, 1)),
        ({"global_batch": 48}, (24, 1)),
        ({"global_batch": 48, "accumulation": 4}, (6, 4)),
        ({"global_batch": 48, "per_replica": 8}, (8, 3)),
        ({"per_replica": 8, "accumulation": 3}, (8, 3)),
        ({"global_batch": 48, "per_replica": 8, "accumulation": 3}, (8, 3)),
    ],
)
def test_any_two_decide_the_third(given: dict[str, int], expected: tuple[int, int]) -> None:
    found = plan_batches(replicas=2, **given)
    assert found == BatchSizes(micro_batch=expected[0] * 2, accumulation=expected[1], replicas=2)
    assert found.per_replica == expected[0]
    assert found.global_batch == found.micro_batch * expected[1]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"global_batch": 0}, ("global batch is 0", "1")),
        ({"per_replica": -1}, ("per-replica batch is -1", "1")),
        ({"accumulation": 0}, ("accumulation is 0", "1")),
        ({"global_batch": 33}, ("batch is 33", "2 replicas", "32 or 34")),
        ({"global_batch": 1}, ("batch is 1", "2 replicas", "to 2")),
        ({"global_batch": 32, "accumulation": 3}, ("accumulation of 3", "2 replicas", "30 or 36")),
        ({"global_batch": 36, "per_replica": 8}, ("per-replica batch of 8", "2 replicas", "32 or 48")),
        ({"global_batch": 48, "per_replica": 8, "accumulation": 2}, ("48", "32", "accumulation is 3")),
    ],
)
def test_what_does_not_fit(given: dict[str, int], named: tuple[str, ...]) -> None:
    with refused(ConfigurationError, *named):
        plan_batches(replicas=2, **given)


def test_on_fewer_replicas_the_batches_stay_and_their_parts_grow() -> None:
    planned = plan_batches(replicas=4, per_replica=8, accumulation=3)
    fewer = planned.on(3)
    assert (fewer.global_batch, fewer.micro_batch, fewer.accumulation) == (96, 32, 3)
    assert fewer.per_replica == 11
