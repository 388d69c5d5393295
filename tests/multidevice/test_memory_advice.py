"""What is said of models that do not fit into memory."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest

import dtrain
from dtrain.engine.fit import memory_advice
from dtrain.upstream.tf_replicas import device_memory

X, Y = np.ones((8, 100), "float32"), np.ones((8, 1000), "float32")
WEIGHTS = 4 * 101 * 1000


def made(strategy: Any, optimizer: Any = "adam") -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(1000)])
        model.compile(optimizer, "mse")
    return model


def warnings_of(model: keras.Model, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a fit of two epochs warns of."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dtrain"):
        model.fit(X, Y, epochs=2, verbose=0)
    return [record.getMessage() for record in caplog.records if "does not fit" in record.getMessage()]


def test_a_model_that_cannot_fit_is_warned_of_once_a_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(dtrain.MirroredStrategy())
    assert warnings_of(made(dtrain.MirroredStrategy()), caplog) == []
    # Two copies of the weights are there; Adam's state takes four times the weights more.
    monkeypatch.setattr(memory_advice, "free_memory", lambda: 4 * WEIGHTS - 1000)
    (said,) = warnings_of(model, caplog)
    assert '"fully_sharded"' in said and "2 replicas" in said
    assert "2.4 MB" in said and "1.2 MB" in said
    assert warnings_of(model, caplog) == []  # by now the optimizer has its state


@pytest.mark.parametrize(
    ("make", "optimizer", "free"),
    [
        (dtrain.MirroredStrategy, "adam", 4 * WEIGHTS + 1000),
        (dtrain.MirroredStrategy, "sgd", 1000),
        (lambda: dtrain.FullyShardedStrategy(smallest=1), "adam", 0),
        (lambda: dtrain.OneDeviceStrategy("/cpu:0"), "adam", 0),
        (dtrain.CentralStorageStrategy, "adam", 0),
    ],
)
def test_nothing_is_said_of_what_fits_and_of_what_is_not_copied(
    make: Any, optimizer: str, free: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_advice, "free_memory", lambda: free)
    assert warnings_of(made(make(), optimizer), caplog) == []


def test_sharded_state_counts_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory_advice, "free_memory", lambda: 2 * WEIGHTS + 1000)
    strategy = dtrain.MirroredStrategy()
    with strategy.scope():
        optimizer = dtrain.optim.shard_state(keras.optimizers.Adam())
    assert warnings_of(made(strategy, optimizer), caplog) == []
    assert warnings_of(made(strategy), caplog)


def test_tensorflow_tells_the_memory_of_its_devices() -> None:
    device = dtrain.MirroredStrategy().extended.worker_devices[0]
    assert device_memory(device) == 1 << 28  # what TensorFlow says of every CPU
