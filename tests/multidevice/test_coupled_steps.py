"""Steps and losses that couple the examples of a batch, so that replicas' parts cannot be put together."""

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

_RANDOM = np.random.default_rng(3)
X = _RANDOM.normal(size=(32, 4)).astype("float32")
Y = np.tanh(X.sum(axis=1, keepdims=True)).astype("float32")
POSITIVE = np.sort((_RANDOM.uniform(size=(32, 1)) < 0.2).astype("float32"), axis=0)


class Step(keras.Model):  # type: ignore[misc]
    """Differentiates `loss` of the squared errors, and returns `shown` of them."""

    def __init__(self, loss: Callable[[Any], Any], shown: Callable[[Any], Any]) -> None:
        super().__init__()
        self._loss, self._shown = loss, shown
        self.hidden, self.last = keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(y - self(x))
            loss = self._loss(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"shown": self._shown(errors), "norm": tf.linalg.global_norm(gradients)}


def trained(made: Any, make: Callable[[], Any], y: Any, **compiled: Any) -> list[np.ndarray]:
    """The weights and losses after an epoch of four steps, without a warning."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if made is None else made.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), **compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = model.fit(X, y, batch_size=8, shuffle=False, verbose=0)
    return [*(np.array(w) for w in model.weights), *map(np.array, history.history.values())]


def partitioned() -> Any:
    return dtrain.MirroredStrategy(["CPU:0", "CPU:1"])


def assert_as_on_one_device(make: Callable[[], Any], y: Any, **compiled: Any) -> None:
    found = trained(partitioned(), make, y, **compiled)
    for one, two in zip(found, trained(None, make, y, **compiled), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)


def root(errors: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(errors))


def product(errors: Any) -> Any:
    return tf.reduce_mean(errors) * tf.reduce_mean(tf.sqrt(errors + 1.0))


def first_rows(errors: Any) -> Any:
    return tf.reduce_mean(errors[: tf.shape(errors)[0] // 2])


def batch_sum(errors: Any) -> Any:
    return tf.reduce_sum(errors) / 8.0


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (root, tf.reduce_mean),
        (product, tf.reduce_mean),
        (first_rows, tf.reduce_mean),
        (tf.reduce_mean, tf.reduce_max),
        (tf.reduce_mean, tf.math.reduce_std),
    ],
    ids=["root", "product", "first rows", "maximum", "deviation"],
)
def test_what_halves_of_a_batch_do_not_give(loss: Any, shown: Any) -> None:
    assert_as_on_one_device(lambda: Step(loss, shown), Y)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(tf.reduce_mean, tf.reduce_mean), (batch_sum, tf.reduce_mean), (tf.reduce_mean, batch_sum)],
    ids=["mean", "sum", "sum shown"],
)
def test_means_and_sums(loss: Any, shown: Any) -> None:
    assert_as_on_one_device(lambda: Step(loss, shown), Y)


class Added(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self._loss = loss

    def call(self, x: Any) -> Any:
        self.add_loss(self._loss(x))
        return x


def balance(x: Any) -> Any:
    """As of a mixture of experts: a product of two means."""
    gates = keras.ops.softmax(x)
    return 3.0 * keras.ops.sum(keras.ops.mean(gates, axis=0) * keras.ops.mean(gates**2, axis=0))


def sum_and_constant(x: Any) -> Any:
    return 0.01 * keras.ops.sum(x**2) + 2.0


@pytest.mark.parametrize(
    "loss",
    [
        balance,
        sum_and_constant,
        lambda x: keras.ops.mean(x**2),
        lambda x: 0.01 * keras.ops.sum(x**2),
    ],
    ids=["balance", "sum and constant", "mean", "sum"],
)
def test_a_loss_that_a_layer_adds(loss: Any) -> None:
    def make() -> Any:
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((4,)), dense(6, activation="tanh"), Added(loss), dense(1)])

    assert_as_on_one_device(make, Y, loss="mse")


def class_balanced(y_true: Any, y_pred: Any) -> Any:
    positive = keras.ops.mean(y_true)
    weights = y_true / (positive + 0.05) + (1 - y_true) / (1.05 - positive)
    return weights[:, 0] * keras.losses.binary_crossentropy(y_true, y_pred)


def by_the_largest(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean((y_true - y_pred) ** 2, axis=-1) / keras.ops.max(keras.ops.abs(y_true))


ONE_HOT = np.eye(3, dtype="float32")[np.sort(_RANDOM.integers(0, 3, 32))]


def rare_classes(y_true: Any, y_pred: Any) -> Any:
    weights = 1.0 / (keras.ops.mean(y_true, axis=0) + 0.1)
    return keras.ops.sum(weights * (y_true - y_pred) ** 2, axis=-1)


@pytest.mark.parametrize(
    ("loss", "y"),
    [(class_balanced, POSITIVE), (by_the_largest, Y[np.argsort(-np.abs(Y[:, 0]))]), (rare_classes, ONE_HOT)],
    ids=["positives last", "largest first", "classes one after another"],
)
def test_a_loss_with_weights_by_the_labels_of_others(loss: Any, y: Any) -> None:
    def make() -> Any:
        layers = keras.layers
        return keras.Sequential([keras.Input((4,)), layers.Dense(y.shape[1], activation="sigmoid")])

    assert_as_on_one_device(make, y, loss=loss)


def hardest(y_true: Any, y_pred: Any) -> Any:
    """The mean of the three largest errors; a part of a batch of five has two or three examples."""
    return keras.ops.mean(keras.ops.top_k(keras.ops.ravel((y_true - y_pred) ** 2), 3)[0])


def test_a_loss_that_needs_more_examples_than_a_replica_has() -> None:
    def make() -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5, drop_remainder=True)
    found = []
    for strategy in (partitioned(), None):
        keras.utils.set_random_seed(1)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = make()
            model.compile(keras.optimizers.SGD(0.1), hardest)
        history = model.fit(data, epochs=2, verbose=0)
        found.append([*(np.array(w) for w in model.weights), np.array(history.history["loss"])])
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)
