"""Models whose steps are partitioned in tests of several devices and of several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

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


class HeadInTraining(keras.Model):  # type: ignore[misc]
    """A layer that is called in training only, so that building the model without it misses its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)
        self.auxiliary = keras.layers.Dense(6)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.body(x)
        if training:
            self.add_loss(tf.reduce_mean(tf.square(self.auxiliary(hidden) - x)))
        return self.out(hidden)


@model
def head_in_training() -> Any:
    made = HeadInTraining()
    made.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return made


class Scaled(keras.Model):  # type: ignore[misc]
    """A step that trains a variable which is no weight of the model."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        variables = [*self.trainable_variables, self.temperature]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True) * self.temperature)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "temperature": tf.identity(self.temperature)}


@model
def variable_outside_of_the_model() -> Any:
    inputs = keras.Input((6,))
    made = Scaled(inputs, dense(6, 1)(inputs))
    made.temperature = tf.Variable(0.5)
    made.compile(keras.optimizers.Adam(0.02), "mse")
    return made


def median_error(y_true: Any, y_pred: Any) -> Any:
    """A metric that no graph can compute."""
    return np.float32(np.median(np.abs(np.asarray(y_true) - np.asarray(y_pred))))


@model
def numpy_metric_run_eagerly() -> Any:
    made = keras.Sequential([dense(6, 8), keras.layers.Dropout(0.4), keras.layers.Dense(1)])
    metrics = [median_error, keras.metrics.RootMeanSquaredError()]
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics, run_eagerly=True)
    return made


@model
def variable_made_in_an_eager_step() -> Any:
    made = variable_made_in_the_step()
    made.compile("sgd", run_eagerly=True)
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
