"""Layers that mix the examples of a batch, or write variables from them, under a `train_step` of Keras'."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain

_RANDOM = np.random.default_rng(5)
X = _RANDOM.normal(size=(32, 4)).astype("float32")
Y = np.tanh(X.sum(axis=1, keepdims=True)).astype("float32")


class Own(keras.layers.Layer):  # type: ignore[misc]
    """Calls a function with itself and its input; has a scalar, a vector and an integer of its own."""

    def __init__(self, function: Callable[[Own, Any], Any]) -> None:
        super().__init__()
        self._function = function

    def build(self, shape: Any) -> None:
        self.scalar = self.add_weight(shape=(), initializer="zeros", trainable=False, name="scalar")
        self.vector = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="vector")
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32", name="count"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        return self._function(self, x) if training else x


def fitted(strategy: Any, inner: Callable[[], list[Any]], *callbacks: Any) -> list[Any]:
    """The weights and losses after two epochs of four steps, without a warning."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((4,)), dense(6, activation="tanh"), *inner(), dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])
    return [*(np.array(w) for w in model.weights), *map(np.array, history.history.values())]


def assert_as_on_one_device(inner: Callable[[], list[Any]], *callbacks: Any) -> None:
    found = fitted(dtrain.MirroredStrategy(["CPU:0", "CPU:1"]), inner, *callbacks)
    for one, two in zip(found, fitted(None, inner, *callbacks), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)


def counts(layer: Own, x: Any) -> Any:
    layer.count.assign_add(tf.shape(x)[0])
    return x


def sums(layer: Own, x: Any) -> Any:
    layer.vector.assign(0.9 * layer.vector + tf.reduce_sum(x, axis=0))
    return x


def keeps_a_row(layer: Own, x: Any) -> Any:
    layer.vector.assign(x[-1])
    return x


@pytest.mark.parametrize("function", [counts, sums, keeps_a_row])
def test_what_a_layer_writes_is_of_the_whole_batch(function: Any) -> None:
    assert_as_on_one_device(lambda: [Own(function)])


def largest(layer: Own, x: Any) -> Any:
    layer.scalar.assign(tf.maximum(layer.scalar, tf.reduce_max(x)))
    return x


def centred(layer: Own, x: Any) -> Any:
    layer.vector.assign(0.5 * layer.vector + 0.5 * tf.reduce_mean(x, axis=0))
    return x - layer.vector


def minus_mean(x: Any) -> Any:
    return x - keras.ops.mean(x, axis=0)


def like_others(x: Any) -> Any:
    return keras.ops.softmax(x @ keras.ops.transpose(x)) @ x


class Functional(keras.Model):  # type: ignore[misc]
    """Operations between layers, as in a functional model."""

    def __new__(cls) -> Any:
        x = keras.Input((6,))
        return keras.Model(x, minus_mean(x))


@pytest.mark.parametrize(
    "inner",
    [
        lambda: [Own(largest)],
        lambda: [Own(centred)],
        lambda: [keras.layers.Lambda(minus_mean)],
        lambda: [Functional()],
        lambda: [keras.layers.UnitNormalization(axis=0)],
        lambda: [keras.layers.Lambda(like_others)],
    ],
    ids=["written", "centred", "lambda", "operation", "Keras' own", "each with each"],
)
def test_layers_mix_the_examples_of_the_whole_batch(inner: Any) -> None:
    assert_as_on_one_device(inner)


def steps_and_mean(layer: Own, x: Any) -> Any:
    layer.count.assign_add(1)
    layer.vector.assign(0.5 * layer.vector + 0.5 * tf.reduce_mean(x, axis=0))
    return x


def of_all_replicas(layer: Own, x: Any) -> Any:
    context = tf.distribute.get_replica_context()
    rows = context.all_gather(x, axis=0) if context.num_replicas_in_sync > 1 else x
    layer.scalar.assign(tf.math.reduce_std(rows))
    return x


@pytest.mark.parametrize(
    "inner",
    [
        lambda: [Own(steps_and_mean)],
        lambda: [Own(of_all_replicas)],
        lambda: [keras.layers.Lambda(lambda x: 2 * keras.ops.mean(x, axis=1, keepdims=True) + x)],
        lambda: [keras.layers.Lambda(keras.ops.transpose), keras.layers.Lambda(keras.ops.transpose)],
    ],
    ids=["a mean", "of all replicas", "each row", "transposed"],
)
def test_layers_whose_parts_could_be_put_together(inner: Any) -> None:
    assert_as_on_one_device(inner)


def weighted_sum(layer: Own, x: Any) -> Any:
    layer.add_loss(layer.scalar * tf.reduce_sum(x**2))
    return x


def test_a_sum_whose_weight_is_0_at_first() -> None:
    layers: list[Own] = []

    def inner() -> list[Own]:
        layers[:] = [Own(weighted_sum)]
        return layers

    def grown(epoch: int, logs: Any) -> None:
        layers[0].scalar.assign(0.01 * epoch)

    assert_as_on_one_device(inner, keras.callbacks.LambdaCallback(on_epoch_begin=grown))


class Ranking(keras.Model):  # type: ignore[misc]
    """Predicts how an example compares with the others."""

    def predict_step(self, data: Any) -> Any:
        return minus_mean(super().predict_step(data))


def test_predictions_that_depend_on_the_batch_are_of_the_whole_batch() -> None:
    found = []
    for strategy in (dtrain.MirroredStrategy(["CPU:0", "CPU:1"]), dtrain.OneDeviceStrategy("CPU:0")):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            x = keras.Input((4,))
            model = Ranking(x, keras.layers.Dense(1)(keras.layers.Lambda(lambda x: 2 * x)(x)))
        found.append(model.predict(X, batch_size=12, verbose=0))
    np.testing.assert_allclose(*found, rtol=2e-4, atol=1e-6)


def first_mean(layer: Own, x: Any) -> Any:
    """Subtracts the mean of the first batch, as a layer does that initializes itself from data."""
    first = tf.equal(layer.scalar, 0.0)
    layer.vector.assign(tf.where(first, tf.reduce_mean(x, axis=0), layer.vector))
    layer.scalar.assign(1.0)
    return x - layer.vector


def gated(layer: Own, x: Any) -> Any:
    """Adds nothing before the gate, of zeros at first, is written."""
    return x + layer.vector * minus_mean(x)


@pytest.mark.parametrize("function", [first_mean, gated])
def test_what_zeros_hide_in_the_first_step(function: Any) -> None:
    assert_as_on_one_device(lambda: [Own(function)])
