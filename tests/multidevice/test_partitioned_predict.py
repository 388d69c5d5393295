"""`predict` by a step that is traced once and partitioned: one device's outputs, rows or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain

ROWS = 35
MODELS: dict[str, Callable[[], Any]] = {}


def model(function: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[function.__name__] = function
    return function


@model
def several_outputs() -> Any:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    outputs = {"scores": keras.layers.Dense(3)(hidden), "hidden": [hidden, keras.layers.Flatten()(inputs)]}
    return keras.Model(inputs, outputs)


class AlongTheBatch(keras.layers.Layer):  # type: ignore[misc]
    """Works along the examples: what a row becomes depends on the others."""

    def call(self, x: Any) -> Any:
        centred = x - keras.ops.mean(x, axis=0)
        return keras.ops.cumsum(centred, axis=0) / tf.cast(tf.shape(x)[0], x.dtype)


@model
def rows_that_depend_on_each_other() -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), AlongTheBatch()])


class Pairs(keras.Model):  # type: ignore[misc]
    """An output that has no row for each example: it comes once for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        features = self.dense(x)
        return keras.ops.matmul(keras.ops.transpose(features), features)


@model
def an_output_without_rows() -> Any:
    made = Pairs()
    made(np.zeros((2, 6), "float32"))
    return made


@model
def a_step_of_ones_own() -> Any:
    class Named(keras.Model):  # type: ignore[misc]
        def predict_step(self, data: Any) -> Any:
            scores = self(data, training=False)
            best = tf.argmax(scores, axis=-1)
            return {"best": best, "names": tf.strings.as_string(best), "order": tf.argsort(scores[:, 0])}

    inputs = keras.Input((6,))
    return Named(inputs, keras.layers.Dense(4)(inputs))


@model
def a_recurrent_layer() -> Any:
    layers = [keras.layers.Reshape((3, 2)), keras.layers.LSTM(5, return_sequences=True)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.GRU(4)])


def predicted(strategy: Any, make: Callable[[], Any], rows: int, *, as_dataset: bool) -> list[Any]:
    keras.utils.set_random_seed(5)
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    with strategy.scope():
        made = make()
    if as_dataset:
        found = made.predict(tf.data.Dataset.from_tensor_slices(x).batch(17), verbose=0)
    else:
        found = made.predict(x, batch_size=17, verbose=0)
    return [*keras.tree.flatten(found), *keras.tree.flatten(made.predict_on_batch(x[:5]))]


@pytest.mark.parametrize("name", MODELS)
def test_predict_has_the_outputs_of_one_device(name: str) -> None:
    """Batches of 17 give uneven parts, and leave one row at the end, so a replica has none."""
    for rows, as_dataset in ((ROWS, False), (ROWS, True), (1, False)):
        one = predicted(tf.distribute.get_strategy(), MODELS[name], rows, as_dataset=as_dataset)
        strategy = dtrain.MirroredStrategy()
        found = predicted(strategy, MODELS[name], rows, as_dataset=as_dataset)
        assert len(found) == len(one)
        for value, expected in zip(found, one, strict=True):
            assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
            if value.dtype.kind == "f":
                np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-6)
            else:
                np.testing.assert_array_equal(value, expected)
