"""Models without a `build`, whose variables, optimizers and metrics come to be when a step first runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.errors import StepError

from .common import BATCH, ROWS, STEPS, assert_close, iterations
from .registry import Job, case

X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True).astype("float32")
FIT: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
Make = Callable[[], Any]


class Block(keras.layers.Layer):
    """Makes its layers in `build`, which is called when it is."""

    def build(self, shape: Any) -> None:
        self.hidden, self.out = keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros", name="shift")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x + self.shift))


class Normed(keras.layers.Layer):
    """Layers that keep statistics, and one that adds a loss; they are made when it is, built when called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.norm(self.dense(x), training=training)


class Parts(keras.Model):
    """Parts that only its step calls: the step minimizes what `losses_of` gives, each by its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([Normed()])
        self.decoder = Block()

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self.decoder(self.encoder(x, training=True))
            loss = tf.reduce_mean((outputs - y) ** 2) + sum(self.encoder.losses)
        weights = self.encoder.trainable_variables + self.decoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"error": loss}

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"error": tf.reduce_mean((self.decoder(self.encoder(x)) - y) ** 2)}

    def predict_step(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return self.decoder(self.encoder(x))


class TwoOptimizers(Parts):
    """A generator and its critic, each with an optimizer; the second one's is not the compiled one."""

    def compile(self, optimizer: Any, **options: Any) -> None:
        super().compile(optimizer=optimizer, **options)
        self.critic_optimizer = keras.optimizers.RMSprop(0.01)
        self.seen: Any = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        if self.seen is None:
            self.seen = keras.metrics.Mean(name="seen")
        for optimizer, part in ((self.critic_optimizer, self.decoder), (self.optimizer, self.encoder)):
            with tf.GradientTape() as tape:
                sign = 1.0 if part is self.decoder else -0.1
                loss = sign * tf.reduce_mean((self.decoder(self.encoder(x, training=True)) - y) ** 2)
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        self.seen.update_state(loss)
        return {"error": self.seen.result()}


class LayerSteps(keras.layers.Layer):
    """A layer that trains itself, by an optimizer that it makes when it first does."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(6, activation="relu")
        self.optimizer: Any = None
        self.mean = keras.metrics.Mean()

    def learn(self, x: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = keras.optimizers.Adam(0.02)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - 1.0) ** 2)
        gradients = tape.gradient(loss, self.dense.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.dense.trainable_weights, strict=True))
        self.mean.update_state(loss)
        return tf.stop_gradient(self.dense(x))


class Forward(keras.Model):
    """Layers that train one after the other, each by itself; nothing is compiled but that."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [LayerSteps(), LayerSteps()]

    @tf.function
    def learn(self, x: Any) -> Any:
        for part in self.parts:
            x = part.learn(x)
        return x

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.learn(batch[0])
        return {f"error_{i}": part.mean.result() for i, part in enumerate(self.parts)}


class CallOnly(keras.Model):
    """No step of its own, no Input: plain Keras' way of building late."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Normed(), Block()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x, training=training))


class Weights(keras.layers.Layer):
    """Variables that are made by a method of its own, from values of the graph too."""

    def make(self, columns: int) -> None:
        self.kernel = keras.Variable(tf.ones([columns, 1]) / 2, name="kernel")
        self.steps = keras.Variable(0, dtype="int32", trainable=False, name="steps")
        self.average = tf.Variable(tf.zeros([]), trainable=False, name="average")


class WeightsOfTheStep(keras.Model):
    """Weights that are made in the step itself, by the shape of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Weights()
        self.is_made = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        if not self.is_made:
            self.own.make(x.shape[-1])
            self.is_made = True
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.own.kernel - 2 * y) ** 2)
        (gradient,) = tape.gradient(loss, [self.own.kernel])
        self.optimizer.apply_gradients([(gradient, self.own.kernel)])
        self.own.steps.assign_add(1)
        self.own.average.assign(0.9 * self.own.average + 0.1 * loss)
        return {"error": loss, "average": self.own.average + 0.0}


class OwnFunction(CallOnly):
    """A step that has a `tf.function` of its own, with a condition that AutoGraph converts."""

    @tf.function
    def gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) + sum(self.losses)
            if loss > 1.0:
                loss = loss / 2.0
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, batch: Any) -> dict[str, Any]:
        loss, gradients = self.gradients(*batch)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": loss}


class Ragged(CallOnly):
    """Every method returns one value or two of each example."""

    def rows(self, x: Any) -> Any:
        return tf.RaggedTensor.from_tensor(x[:, :2], tf.cast(x[:, 0] > 0, tf.int32) + 1)

    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step(batch) | {"ragged": self.rows(batch[0])}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step(batch) | {"ragged": self.rows(batch[0])}

    def predict_step(self, batch: Any) -> Any:
        return self.rows(keras.utils.unpack_x_y_sample_weight(batch)[0])


class OutOfTheBatch(CallOnly):
    """A step that wants a variable to begin with what the first batch gives."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.first = tf.Variable(tf.reduce_mean(batch[0]), name="first")
        return {"first": self.first + 0.0}


def compiled(kind: Any, optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01)) -> Make:
    def make() -> Any:
        model = kind()
        model.compile(optimizer=optimizer(), loss="mse" if kind in (CallOnly, Ragged) else None)
        return model

    return make


MODELS: dict[str, Make] = {
    "parts": compiled(Parts, lambda: "adam"),
    "two_optimizers": compiled(TwoOptimizers, lambda: keras.optimizers.SGD(0.01, momentum=0.9, clipnorm=1.0)),
    "forward": compiled(Forward),
    "call_only": compiled(CallOnly),
    "own_function": compiled(OwnFunction),
    "weights_of_the_step": compiled(WeightsOfTheStep),
}


def under(strategy: Any, make: Make) -> Any:
    keras.utils.set_random_seed(4)
    with strategy.scope():
        return make()


def losses_of(history: Any) -> list[float]:
    """What the epochs of a `fit` reported of the loss."""
    key = next(key for key in ("error", "error_0", "loss") if key in history.history)
    return list(history.history[key])


def in_order(job: Job) -> Any:
    """A strategy whose steps follow one another, whichever worker computes them."""
    return dtrain.ParameterServerStrategy(max_staleness=0)


def assert_alike(found: Any, expected: Any, name: str) -> None:
    assert [v.shape for v in found.variables] == [v.shape for v in expected.variables], name
    for one, other in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_allclose(
            one.numpy(), other.numpy(), rtol=2e-4, atol=1e-6, err_msg=f"{name}: {one.path}"
        )


@case
def models_that_their_steps_build_are_one_devices(job: Job) -> None:
    strategy = in_order(job)
    for name in ("two_optimizers", "forward", "weights_of_the_step"):
        models, logs = [], []
        for each in (tf.distribute.get_strategy(), strategy):
            models.append(under(each, MODELS[name]))
            logs.append(models[-1].fit(X, Y, **FIT).history)
        expected, found = models
        assert_alike(found, expected, name)
        for key in logs[0]:
            np.testing.assert_allclose(logs[1][key], logs[0][key], rtol=2e-4, err_msg=f"{name}: {key}")


@case
def models_that_their_steps_build_train(job: Job) -> None:
    """With workers that do not wait for each other, every step counts, and the loss falls."""
    for name in ("parts", "forward"):
        model = under(job.strategy, MODELS[name])
        losses = losses_of(model.fit(X, Y, **(FIT | {"epochs": 4})))
        assert np.isfinite(losses).all() and losses[-1] < losses[0], (name, losses)
        if name != "forward":
            assert iterations(model) == 4 * STEPS, name


@case
def what_is_built_late_goes_on(job: Job) -> None:
    """`fit`, `predict`, `evaluate` and `fit` again; and a `predict` or `evaluate` that comes first."""
    strategy = in_order(job)
    orders = {
        "parts": ("fit", "predict", "evaluate", "fit"),
        "call_only": ("predict", "fit", "predict"),
        "own_function": ("evaluate", "fit", "evaluate"),
    }
    for name, order in orders.items():
        outcomes = []
        for each in (tf.distribute.get_strategy(), strategy):
            model = under(each, MODELS[name])
            calls = {
                "fit": lambda model=model: losses_of(model.fit(X, Y, **FIT)),
                "predict": lambda model=model: model.predict(X, batch_size=BATCH, verbose=0),
                "evaluate": lambda model=model: model.evaluate(X[:BATCH], Y[:BATCH], verbose=0),
            }
            outcomes.append(([calls[call]() for call in order], model))
        (expected, alone), (found, model) = outcomes
        assert_close(found, expected, atol=1e-5)
        assert_alike(model, alone, name)


@case
def ragged_values_of_a_step_are_one_devices(job: Job) -> None:
    found = []
    for strategy in (tf.distribute.get_strategy(), in_order(job)):
        model = under(strategy, compiled(Ragged))
        fitted = model.fit(X, Y, **FIT).history["ragged"][-1]
        tested = model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)["ragged"]
        values = (fitted, tested, model.predict(X, batch_size=BATCH, verbose=0))
        found.append([each.to_tensor().numpy() if hasattr(each, "to_tensor") else each for each in values])
    assert_close(found[1], found[0])
    assert found[1][0].shape == (ROWS % BATCH, 2) and found[1][2].shape == (ROWS, 2)


@case
def a_variable_made_of_a_batch_is_refused(job: Job) -> None:
    model = under(job.strategy, compiled(OutOfTheBatch))
    with pytest.raises(StepError, match=r"train_step makes the variable 'first' from values of its batch"):
        model.fit(X, Y, **FIT)


@case
def weights_are_loaded_before_what_is_built_late_trains(job: Job) -> None:
    make = compiled(CallOnly, lambda: keras.optimizers.SGD(0.01))
    first = under(tf.distribute.get_strategy(), make)
    first.fit(X, Y, **FIT)
    path = str(job.folder / "first.weights.h5")
    first.save_weights(path)
    models = []
    for strategy in (tf.distribute.get_strategy(), in_order(job)):
        model = under(strategy, make)
        model.evaluate(X[:BATCH], Y[:BATCH], verbose=0)
        model.load_weights(path)
        model.fit(X, Y, **FIT)
        models.append(model)
    assert_alike(models[1], models[0], "loaded")
