"""`fit` and `evaluate` by a step that is traced once and partitioned: one device's numbers, equal copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def dense(*sizes: int) -> keras.Sequential:
    inner = [keras.layers.Dense(size, "tanh") for size in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *inner, keras.layers.Dense(sizes[-1])])


@model
def dropout_and_metrics() -> Any:
    made = keras.Sequential([dense(6, 8, 8), keras.layers.Dropout(0.4), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    return made


@model
def synchronized_normalization() -> Any:
    made = keras.Sequential(
        [dense(6, 8), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
    )
    made.compile("sgd", "huber")
    return made


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """A metric whose update depends on its value before, which no sum of parts follows."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(tf.maximum(self.seen * 0.9, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.seen


@model
def own_metric_and_head_loss() -> Any:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, "relu", activity_regularizer="l2")(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    made.compile(keras.optimizers.SGD(0.05, global_clipnorm=0.5), "mae", metrics=[Largest()])
    return made


class Careful(keras.Model):  # type: ignore[misc]
    """Updates that depend on the loss, gradients with noise, and a weight averaged by hand."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_variables
        noise = keras.random.SeedGenerator(3) if not hasattr(self, "noise") else self.noise
        self.noise = noise
        gradients = [
            gradient + 0.01 * keras.random.normal(gradient.shape, seed=noise)
            for gradient in tape.gradient(loss, weights)
        ]
        rate = loss / (tf.linalg.global_norm(gradients) ** 2 + 1.0)

        def update() -> tf.Tensor:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(rate * gradient)
            return tf.constant(1)

        tf.cond(tf.math.is_finite(loss) & (loss > 0.01), update, lambda: tf.constant(0))
        return {"loss": loss, "rows": tf.shape(x)[0]}


@model
def update_that_depends_on_the_loss() -> Any:
    inputs = keras.Input((6,))
    made = Careful(inputs, dense(6, 4, 1)(inputs))
    made.compile("sgd")
    return made


class Adversaries(keras.Model):  # type: ignore[misc]
    """Two optimizers, which are built in the step; one of them acts in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = dense(6, 8, 6), dense(6, 8, 1)
        self.of_maker, self.of_critic = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data[:2]
        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.maker(x))) - tf.reduce_mean(self.critic(x))
        weights = self.critic.trainable_variables
        self.of_critic.apply(tape.gradient(loss, weights), weights)

        def make() -> None:
            with tf.GradientTape() as tape:
                own = -tf.reduce_mean(self.critic(self.maker(x)))
            weights = self.maker.trainable_variables
            self.of_maker.apply(tape.gradient(own, weights), weights)

        tf.cond(tf.equal(self.steps % 2, 0), make, lambda: None)
        return {"loss": loss}


@model
def optimizers_in_a_condition() -> Any:
    made = Adversaries()
    made.compile()
    return made


class LateHead(keras.Model):  # type: ignore[misc]
    """A layer that is made in the first step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        if not hasattr(self, "scale"):
            self.scale = self.add_weight(shape=(1,), initializer="ones", name="scale")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) * self.scale - y))
        weights = [*self.layers[-1].trainable_variables, self.scale]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss}


@model
def variable_made_in_the_step() -> Any:
    inputs = keras.Input((6,))
    made = LateHead(inputs, dense(6, 1)(inputs))
    made.compile("sgd")
    return made


def trained(strategy: Any, make: Callable[[], Any], *, batch: int, as_dataset: bool) -> Any:
    keras.utils.set_random_seed(5)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 6)).astype("float32")
    y = generator.normal(size=(ROWS, 1)).astype("float32")
    with strategy.scope():
        made = make()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch) if as_dataset else None
    given = {"x": data} if as_dataset else {"x": x, "y": y, "batch_size": batch, "shuffle": False}
    history = made.fit(**given, epochs=2, verbose=0).history
    scores = made.evaluate(x, y, batch_size=batch, verbose=0) if made.loss else []
    return made, history, scores


def partitioned() -> Any:
    strategy = dtrain.MirroredStrategy()
    strategy.dtrain_layout = replace(strategy.dtrain_layout, partitioned=True)
    return strategy


def copies_of(made: Any) -> list[Any]:
    optimizers = [each for each in vars(made).values() if isinstance(each, keras.optimizers.Optimizer)]
    optimizers += [made.optimizer] if made.optimizer is not None else []
    variables = made.variables + [each for one in optimizers for each in one.variables]
    return [each.value for each in variables if hasattr(each.value, "values")]


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_has_the_numbers_of_one_device(name: str) -> None:
    """Batches of 17 give uneven parts, and leave one row at the end, so a replica has none."""
    one = trained(tf.distribute.get_strategy(), MODELS[name], batch=17, as_dataset=False)
    for as_dataset in (False, True):
        made, history, scores = trained(partitioned(), MODELS[name], batch=17, as_dataset=as_dataset)
        for key, values in one[1].items():
            np.testing.assert_allclose(history[key], values, rtol=2e-4, atol=1e-5, err_msg=key)
        np.testing.assert_allclose(scores, one[2], rtol=2e-4, atol=1e-5)
        for found, expected in zip(made.get_weights(), one[0].get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
        for variable in copies_of(made):
            if variable.synchronization == tf.VariableSynchronization.ON_READ:
                continue
            for copy in variable.values[1:]:
                np.testing.assert_array_equal(copy.numpy(), variable.values[0].numpy(), variable.name)


def test_normalization_that_is_not_synchronized_uses_each_replicas_rows() -> None:
    def make() -> Any:
        body = [dense(6, 8), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        made = keras.Sequential(body)
        made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    by_replica = trained(dtrain.MirroredStrategy(), make, batch=17, as_dataset=False)
    found = trained(partitioned(), make, batch=17, as_dataset=False)
    for value, expected in zip(found[0].get_weights(), by_replica[0].get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(found[1]["loss"], by_replica[1]["loss"], rtol=2e-4)
