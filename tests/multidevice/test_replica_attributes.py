"""What layers keep in Python attributes between calls, under two replicas whose threads take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dtrain

Numbers = list[np.ndarray]
_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(20, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class AddsLoss(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2) * 0.1)
        return x


class Box:
    value: Any = None


class KeepsAttributes(layers.Layer):
    """Keeps tensors in an attribute, a list, a dict and an object, counts, and has a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(8), layers.Dense(8)
        self.norm = layers.BatchNormalization(synchronized=True)
        self.seen: list[Any] = []
        self.named: dict[str, Any] = {"x": None}
        self.box = Box()
        self.calls, self.scales, self.inside = 0, [1.0, 0.5], False

    def call(self, x: Any) -> Any:
        if self.inside:
            return self.norm(x)
        self.seen.clear()
        self.calls, self.inside = 0, True
        for dense in (self.first, self.second):
            x = dense(x)
            self.last = x
            self.seen.append(x)
            self.named["x"], self.box.value = x * 0.2, x * 0.3
            x = self(x) * self.scales[self.calls]
            self.calls += 1
        self.inside = False
        return x + 0.1 * self.last + 0.2 * self.seen[0] + self.named["x"] + self.box.value


class ReadsAfterUpdate(keras.Model):
    """Reads losses and an attribute when the optimizer has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(8), AddsLoss(), layers.Dense(1)])
        self.mean = keras.metrics.Mean(name="seen")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            self.last = self.net(x)
            loss = tf.reduce_mean((self.last - y) ** 2) + sum(self.net.losses)
        variables = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean.update_state(sum(self.net.losses) + tf.reduce_mean(self.last**2))
        return {"seen": self.mean.result()}


def fitted(model: keras.Model, *, eagerly: bool = False) -> Numbers:
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
    history = model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    return [np.array(history[key]) for key in sorted(history)]


def losses_and_attributes(strategy: tf.distribute.Strategy) -> Numbers:
    dense = layers.Dense(4, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), dense, AddsLoss(), KeepsAttributes(), layers.Dense(1)])
    return [*fitted(model), np.array(model.evaluate(X, Y, batch_size=8, verbose=0))]


def attributes_eagerly(strategy: tf.distribute.Strategy) -> Numbers:
    return fitted(keras.Sequential([keras.Input((4,)), KeepsAttributes(), layers.Dense(1)]), eagerly=True)


def read_after_the_update(strategy: tf.distribute.Strategy) -> Numbers:
    return fitted(ReadsAfterUpdate())


def custom_loop_that_builds(strategy: tf.distribute.Strategy) -> Numbers:
    """The model is built by the first replica's first call."""
    model = keras.Sequential([AddsLoss(), KeepsAttributes(), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)

    def replica_step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((model(x, training=True) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=8)
            loss += tf.nn.scale_regularization_loss(sum(model.losses))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss + tf.nn.scale_regularization_loss(sum(model.losses))

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("sum", strategy.run(replica_step, args=(batch,)), axis=None)

    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
    losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(data)]
    return [np.array(losses), model.get_weights()[-1]]


@pytest.mark.parametrize(
    "program",
    [losses_and_attributes, attributes_eagerly, read_after_the_update, custom_loop_that_builds],
)
def test_a_replica_finds_its_own(program: Callable[[Any], Numbers]) -> None:
    found = {}
    for strategy in (tf.distribute.get_strategy(), dtrain.MirroredStrategy()):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        with strategy.scope() if found else contextlib.nullcontext():
            found[type(strategy).__name__] = program(strategy)
    alone, mirrored = found.values()
    for a, b in zip(alone, mirrored, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=1e-5)
