"""Trials of the batch finder that die, of memory or of something else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from dtrain.errors import ConfigurationError, TaskFailedError
from dtrain.optim import batch_finder, largest_batch
from refusals import refused

LIMIT = 1_500_000_000


def make(batch: int) -> tuple[Any, Any]:
    """A model of which an example takes some 12 MB."""
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((1000, 300)), *(keras.layers.Dense(1000) for _ in range(3))])
    model.compile("sgd", "mse")
    return model, (np.zeros((batch, 1000, 300), "float32"), np.zeros((batch, 1000, 1000), "float32"))


@pytest.mark.soak("test_batch_finder.py has single trials and the search with trials by arithmetic")
def test_the_largest_is_found_and_nothing_else_dies() -> None:
    """A whole search: its answer fits once more, and twice of it does not."""
    largest = largest_batch(make, memory_limit=LIMIT, steps=2)
    assert 4 <= largest <= 120
    finder = batch_finder.Finder(make, memory_limit=LIMIT, steps=2, timeout=300)
    assert finder.trial(2 * largest).outcome == "too large"


def test_too_little_for_tensorflow() -> None:
    with pytest.raises(ConfigurationError, match="TensorFlow alone holds"):
        largest_batch(make, memory_limit=50_000_000)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "too large"),
        (lambda: (os.write(2, b"terminate: std::bad_alloc\n"), os.abort()), "too large"),
        (lambda: (os.write(2, b"terminate: std::bad_alloc\n" + 50 * b"a frame\n"), os.abort()), "too large"),
        (lambda: (_ for _ in ()).throw(MemoryError("no more")), "too large"),
        (os.abort, None),
    ],
)
def test_what_the_death_of_a_trial_means(end: Any, outcome: str | None) -> None:
    finder = batch_finder.Finder(make, memory_limit=LIMIT, run=lambda *_, **__: end())
    if outcome is None:
        with refused(TaskFailedError, "SIGABRT"):
            finder.trial(3)
    else:
        assert finder.trial(3).outcome == outcome


def test_a_trial_that_the_caller_ended_says_nothing_of_memory() -> None:
    caller = os.getpid()

    def runs(*_: Any, **__: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:  # at the second SIGTERM, the caller kills this process
            os.kill(caller, signal.SIGTERM)
            time.sleep(0.05)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with refused(TaskFailedError, "SIGTERM was received") as caught:
            batch_finder.Finder(make, memory_limit=LIMIT, run=runs).trial(3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.exit_code == -signal.SIGKILL
