"""Deterministic operations in one process: the same bits as without, and no time that was not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import dtrain

X = np.random.default_rng(0).normal(size=(70, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one_device": lambda: dtrain.OneDeviceStrategy("/cpu:0"),
    "mirrored": lambda: dtrain.MirroredStrategy(["CPU:0", "CPU:1"]),
}


@pytest.fixture(autouse=True)
def not_deterministic() -> Iterator[None]:
    yield
    config.disable_op_determinism()


def model(strategy: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3, "relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        made.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return made


def trained(made: Any) -> list[Any]:
    """The numbers of arrays, of a dataset of known and of unknown length, and of single batches."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    unknown = data.filter(lambda x, y: tf.constant(True))
    found: list[Any] = [made.fit(X, Y, batch_size=16, epochs=2, validation_data=(X, Y), verbose=0).history]
    found += [made.fit(data, verbose=0).history, made.fit(unknown, verbose=0).history]
    found += [made.train_on_batch(X, Y), made.evaluate(X, Y, verbose=0)]
    return [*found, made.predict(X, verbose=0).tolist(), [each.tolist() for each in made.get_weights()]]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", STRATEGIES)
def test_deterministic_operations_give_the_same_bits(name: str) -> None:
    strategy = STRATEGIES[name]()
    expected = trained(model(strategy))
    tf.config.experimental.enable_op_determinism()
    assert trained(model(strategy)) == expected


def test_they_are_enabled_between_two_fits_of_a_model_and_the_report_says_what_it_lacks() -> None:
    made = model(STRATEGIES["mirrored"]())
    usual = made.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    assert all(each["unmeasured"] == [] and each["steady"]["waiting"] >= 0 for each in usual.time_report)
    assert usual.input_report
    tf.config.experimental.enable_op_determinism()
    found = made.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    assert all(each["unmeasured"] == ["input"] for each in found.time_report)
    assert all(each["steady"]["waiting"] is None for each in found.time_report)
    assert found.input_report == []
