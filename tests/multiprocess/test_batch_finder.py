"""The largest batch is found by trials that may die, and nothing that a trial does hurts the caller."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from dtrain.base.free_memory import free_memory
from dtrain.errors import ConfigurationError, TaskTimeoutError
from dtrain.optim import batch_finder, largest_batch
from dtrain.optim.batch_trial import BatchTrial
from refusals import refused

pytestmark = pytest.mark.long

LIMIT = 1_500_000_000


def make(batch: int) -> tuple[Any, Any]:
    """A model of which an example takes some 12 MB: few trials tell much."""
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((1000, 300)), *(keras.layers.Dense(1000) for _ in range(3))])
    model.compile("sgd", "mse")
    return model, (np.zeros((batch, 1000, 300), "float32"), np.zeros((batch, 1000, 1000), "float32"))


def test_what_fits_and_what_does_not() -> None:
    """One trial fits, the other is refused memory; both leave this process as it was."""
    assert largest_batch(make, memory_limit=LIMIT, start=8, granularity=8, limit=8, steps=1) == 8
    with refused(ConfigurationError, "512 examples", "1.50 GB"):
        largest_batch(make, memory_limit=LIMIT, start=512, granularity=512, steps=1)


def test_an_own_error_is_the_callers() -> None:
    def fails(batch: int) -> Any:
        raise KeyError(f"no column for {batch}")

    with pytest.raises(KeyError, match="no column for 1") as caught:
        largest_batch(fails, memory_limit=LIMIT)
    assert any("in fails" in note for note in caught.value.__notes__)


def test_a_trial_that_hangs() -> None:
    def hangs(batch: int) -> Any:
        signal.pause()

    with refused(TaskTimeoutError, "batch of 1", "3 s"):
        largest_batch(hangs, memory_limit=LIMIT, timeout=3)


class PretendFinder(batch_finder.Finder):
    """Says that everything up to `most` fits, and notes what was tried."""

    def __init__(self, most: int) -> None:
        super().__init__(make, memory_limit=1000)
        self.most = most
        self.tried: list[int] = []

    def trial(self, batch: int) -> BatchTrial:
        self.tried.append(batch)
        return BatchTrial(outcome="fits" if batch <= self.most else "too large")


def searched(
    most: int,
    *,
    start: int | None = None,
    limit: int = 1 << 20,
    granularity: int | None = None,
) -> tuple[int, list[int]]:
    """The search alone: the answer and what was tried."""
    finder = PretendFinder(most)
    largest = batch_finder.search(finder, start=start, limit=limit, granularity=granularity)
    return largest, finder.tried


@pytest.mark.parametrize("most", [1, 2, 3, 15, 16, 17, 100, 1000, 4095, 4096])
@pytest.mark.parametrize("start", [None, 1, 50, 5000])
def test_the_search(most: int, start: int | None) -> None:
    largest, tried = searched(most, start=start)
    assert largest <= most < largest + max(1, largest // 16) + 1
    assert len(tried) == len(set(tried)) <= 22
    largest, tried = searched(most, start=start, limit=64)
    assert largest <= 64 and max(tried) <= 64
    if most >= 10:
        largest, tried = searched(most, start=start, granularity=10)
        assert largest == most // 10 * 10
        assert all(size % 10 == 0 for size in tried)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("start", "granularity", "limit", "steps", "timeout", "memory_limit")),
        ("timeout", "x"),
        ("timeout", math.nan),
        ("memory_limit", 8e9),
        ("memory_limit", "8GB"),
    ],
)
def test_bad_numbers(name: str, value: Any) -> None:
    with refused(ConfigurationError, name, value):
        largest_batch(make, **{"memory_limit": LIMIT} | {name: value})


def test_what_cannot_travel() -> None:
    lock = __import__("threading").Lock()
    with refused(ConfigurationError, "make"):
        largest_batch(lambda batch: lock, memory_limit=LIMIT)


def test_the_machines_free_memory() -> None:
    assert 100_000_000 < free_memory() < 1 << 50


def test_free_memory_where_no_cgroups_are_shown(tmp_path: Path) -> None:
    assert 100_000_000 < free_memory(tmp_path / "cgroup") < 1 << 50
