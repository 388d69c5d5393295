"""Data of unknown length: Keras finds its end in a step that it has begun, and does what needs no data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain

_RANDOM = np.random.default_rng(2)
X = _RANDOM.normal(size=(32, 4)).astype("float32")
Y = np.tanh(X.sum(axis=1, keepdims=True)).astype("float32")


class OwnStep(keras.Model):  # type: ignore[misc]
    """Two optimizers, one for each layer."""

    def compile(self, optimizer: Any, **given: Any) -> None:
        super().compile(optimizer, **given)
        self.other = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5))
        self.other.build(self.layers[1].trainable_variables)
        self.optimizer.build(self.layers[-1].trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        for layer, optimizer, part in (
            (self.layers[1], self.other, gradients[:2]),
            (self.layers[-1], self.optimizer, gradients[-2:]),
        ):
            optimizer.apply(part, layer.trainable_variables)
        return {"loss": loss}


class Calls(keras.layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x / (1.0 + 0.1 * self.calls)


def fitted(strategy: Any, optimizer: Any, kind: Any, inner: Any, **compiled: Any) -> list[np.ndarray]:
    """The weights, the optimizer's state and the losses of three epochs."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        x = keras.Input((4,))
        y = keras.layers.Dense(1)(inner()(keras.layers.Dense(6, activation="tanh")(x)))
        model = kind(x, y)
        model.compile(optimizer(), loss="mse", **compiled)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(8)
    history = model.fit(data, epochs=3, verbose=0)
    variables = [*model.weights, *model.optimizer.variables]
    return [*(np.array(v) for v in variables), np.array(history.history["loss"])]


def adam() -> Any:
    return keras.optimizers.Adam(0.05)


def adam_w() -> Any:
    return keras.optimizers.AdamW(0.05, weight_decay=0.1)


CASES: dict[str, tuple[Callable[[], Any], Any, Any, dict[str, Any]]] = {
    "Keras' step": (adam, keras.Model, keras.layers.Identity, {}),
    "own step, two optimizers": (adam, OwnStep, keras.layers.Identity, {}),
    "weight decay": (adam_w, keras.Model, keras.layers.Identity, {}),
    "state of the optimizer": (lambda: keras.optimizers.Nadam(0.05), keras.Model, keras.layers.Identity, {}),
    "a layer that counts": (adam, keras.Model, Calls, {}),
    "XLA": (adam, keras.Model, keras.layers.Identity, {"jit_compile": True}),
    "several steps a call": (adam, keras.Model, keras.layers.Identity, {"steps_per_execution": 2}),
    "a loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(adam()),
        keras.Model,
        keras.layers.Identity,
        {},
    ),
}


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]], ids=["one", "two"])
@pytest.mark.parametrize("case", CASES)
def test_the_end_of_the_data_is_as_on_one_device(case: str, devices: list[str]) -> None:
    optimizer, kind, inner, compiled = CASES[case]
    found = fitted(dtrain.MirroredStrategy(devices), optimizer, kind, inner, **compiled)
    expected = fitted(None, optimizer, kind, inner, **compiled)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)


def test_seeds_are_drawn_at_the_end_of_the_data() -> None:
    def dropout() -> Any:
        return keras.layers.Dropout(0.5, seed=3)

    found, expected = (
        fitted(strategy, adam, keras.Model, dropout) for strategy in (dtrain.OneDeviceStrategy("CPU:0"), None)
    )
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-6)
