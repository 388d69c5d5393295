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
from dtrain.errors import StepError

_RANDOM = np.random.default_rng(5)
X = _RANDOM.normal(size=(32, 4)).astype("float32")
Y = np.tanh(X.sum(axis=1, keepdims=True)).astype("float32")
MIXES, WRITES = "depends on the other examples of the batch", "that is not a mean over them"


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


def fitted(strategy: Any, inner: Callable[[], list[Any]], *callbacks: Any) -> tuple[list[Any], list[str]]:
    """The weights and losses after two epochs of four steps, and the warnings of dtrain."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((4,)), dense(6, activation="tanh"), *inner(), dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])
    said = [str(each.message) for each in caught if "one device's" in str(each.message)]
    return [*(np.array(w) for w in model.weights), *map(np.array, history.history.values())], said


def partitioned() -> Any:
    """Divides one program."""
    return dtrain.MirroredStrategy(["CPU:0", "CPU:1"])


def in_replicas() -> Any:
    """Runs the step on each replica."""
    return dtrain.CentralStorageStrategy(["CPU:0", "CPU:1"])


def assert_as_on_one_device(inner: Callable[[], list[Any]], *callbacks: Any) -> None:
    found, said = fitted(partitioned(), inner, *callbacks)
    assert not said
    expected, _ = fitted(None, inner, *callbacks)
    for one, two in zip(found, expected, strict=True):
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


@pytest.mark.parametrize(("function", "name"), [(counts, "count"), (sums, "vector"), (keeps_a_row, "vector")])
def test_what_replicas_cannot_write_is_an_error(function: Any, name: str) -> None:
    with pytest.raises(StepError, match=f"A layer writes the variable '.*{name}' from its examples"):
        fitted(in_replicas(), lambda: [Own(function)])
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


class MinusMean(keras.layers.Layer):  # type: ignore[misc]
    """Normalizes as in training and hides it behind random numbers, which inference has not."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = keras.layers.Dropout(0.2), keras.layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.norm(self.drop(minus_mean(x), training=training), training=training)


class Functional(keras.Model):  # type: ignore[misc]
    """Operations between layers, as in a functional model."""

    def __new__(cls) -> Any:
        x = keras.Input((6,))
        return keras.Model(x, minus_mean(x))


@pytest.mark.parametrize(
    ("inner", "about"),
    [
        (lambda: [Own(largest)], WRITES),
        (lambda: [Own(centred)], MIXES),
        (lambda: [keras.layers.Lambda(minus_mean)], MIXES),
        (lambda: [MinusMean()], MIXES),
        (lambda: [Functional()], MIXES),
        (lambda: [keras.layers.UnitNormalization(axis=0)], MIXES),
        (lambda: [keras.layers.Lambda(like_others)], MIXES),
    ],
    ids=["written", "centred", "lambda", "behind dropout", "operation", "Keras' own", "each with each"],
)
def test_what_a_part_of_the_batch_changes_is_said(inner: Any, about: str) -> None:
    _, said = fitted(in_replicas(), inner)
    assert len(said) == 1 and about in said[0]


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
def test_one_program_mixes_the_examples_of_the_whole_batch(inner: Any) -> None:
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
def test_what_equals_one_device_is_not_said_to_differ(inner: Any) -> None:
    _, said = fitted(in_replicas(), inner)
    assert not said
    assert_as_on_one_device(inner)


def weighted_sum(layer: Own, x: Any) -> Any:
    layer.add_loss(layer.scalar * tf.reduce_sum(x**2))
    return x


def test_a_sum_whose_weight_is_0_at_first() -> None:
    """The sum is found to be one in the first step, where it is 0."""
    layers: list[Own] = []

    def inner() -> list[Own]:
        layers[:] = [Own(weighted_sum)]
        return layers

    def grown(epoch: int, logs: Any) -> None:
        layers[0].scalar.assign(0.01 * epoch)

    assert_as_on_one_device(inner, keras.callbacks.LambdaCallback(on_epoch_begin=grown))


def test_a_layer_that_mixes_in_training_only_is_not_said_to_mix_in_evaluation() -> None:
    with in_replicas().scope():
        model = keras.Sequential([keras.Input((4,)), Own(centred), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.evaluate(X, Y, verbose=0)


class Ranking(keras.Model):  # type: ignore[misc]
    """Predicts how an example compares with the others."""

    def predict_step(self, data: Any) -> Any:
        return minus_mean(super().predict_step(data))


@pytest.mark.parametrize("kind", [Ranking, keras.Model])
def test_predictions_that_depend_on_the_batch_are_said(kind: Any) -> None:
    with in_replicas().scope():
        x = keras.Input((4,))
        model = kind(x, keras.layers.Dense(1)(keras.layers.Lambda(lambda x: 2 * x)(x)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict(X, verbose=0)
    assert [MIXES in str(each.message) for each in caught] == [True] * (kind is Ranking)


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
def test_what_is_hidden_by_zeros_is_said(function: Any) -> None:
    _, said = fitted(in_replicas(), lambda: [Own(function)])
    assert any(MIXES in line for line in said)
    assert_as_on_one_device(lambda: [Own(function)])
