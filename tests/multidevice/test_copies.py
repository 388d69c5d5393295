"""The replicas' copies of the weights are compared at the end of each epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dtrain
import dtrain.checkpoint
from dtrain.engine.callbacks import copies
from dtrain.errors import ReplicaMismatchError

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


def fitted(change: Callable[[Any], Any], **how: Any) -> Any:
    """A model of two replicas, of whose last layer a callback changes the second copy in the second epoch."""
    strategy = dtrain.MirroredStrategy(["CPU:0", "CPU:1"], **how)
    with strategy.scope():
        body = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *body, keras.layers.Dense(1, name="last")])
        model.compile("adam", "mse")

    def at_the_end(epoch: int, logs: Any) -> None:
        copy = model.get_layer("last").kernel.value.values[1]
        if epoch == 1:
            copy.assign(change(copy.numpy()))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=at_the_end)
    model.fit(X, X[:, :1], epochs=3, batch_size=6, verbose=0, callbacks=[callback])
    return model


@pytest.fixture(autouse=True)
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_warned", False)


@pytest.mark.parametrize("how", [{}, {"gradient_hook": "local_sgd"}], ids=["synchronous", "local SGD"])
def test_equal_copies_are_not_spoken_of(how: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dtrain"):
        dtrain.compare_copies(fitted(lambda kernel: kernel, **how))
    assert not caplog.records


@pytest.mark.parametrize("wrong", [lambda kernel: kernel * 1.001, lambda kernel: kernel * np.nan])
def test_other_weights_are_an_error_that_names_them(wrong: Any) -> None:
    with pytest.raises(ReplicaMismatchError, match=r"After epoch 2, .* 2 replicas .*differ: '.*last/kernel'"):
        fitted(wrong)


def test_last_bits_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dtrain"):
        model = fitted(lambda kernel: np.nextafter(kernel, np.float32(9)))
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith("After epoch 2, the replicas' copies") and "last/kernel" in said
    copy = model.get_layer("last").kernel.value.values[1]
    copy.assign(copy + 1.0)
    with pytest.raises(ReplicaMismatchError, match="Now, the copies"):
        dtrain.compare_copies(model)


def test_a_loop_compares_them_when_it_saves(tmp_path: Path) -> None:
    strategy = dtrain.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="last")])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    saved = dtrain.checkpoint.Checkpoints(tmp_path / "backup", model)
    saved.save(1)
    saved.wait()
    copy = model.get_layer("last").kernel.value.values[1]
    copy.assign(copy + 1.0)
    with pytest.raises(ReplicaMismatchError, match="After step 2, the copies"):
        saved.save(2)
    assert saved.restore() == {"step": 1}
    saved.close()
