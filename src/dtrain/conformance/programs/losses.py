"""Losses, their reductions, and what weighs them or adds to them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from dtrain.conformance.corpus import ProgramRun, Values, program
from dtrain.conformance.parts import classes, dataset, evaluated, network, regression, sgd, tokens, trained

ops = keras.ops


@program()
def loss_summed(run: ProgramRun) -> Values:
    """A loss with `reduction="sum"`."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network()
        model.compile(sgd(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    record = model.fit(dataset(x, y), epochs=2, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def loss_mean_by_weights(run: ProgramRun) -> Values:
    """A loss with `reduction="mean_with_sample_weight"`, which divides by the sum of the weights."""
    x, y = regression(42)
    weight = np.where(np.arange(42) % 16 < 8, 0.1, 3.0).astype("float32")
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return trained(model, model.fit(dataset(x, y, weight), epochs=2, verbose=0))


@program()
def loss_function_of_one_value(run: ProgramRun) -> Values:
    """A user's loss function that returns the mean of the batch."""
    x, y = regression()
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred)))
    return trained(model, model.fit(dataset(x, y), epochs=3, verbose=0))


@program()
def loss_of_the_whole_batch(run: ProgramRun) -> Values:
    """Keras' Dice loss, a ratio of sums over all examples of a batch."""
    x, _ = regression()
    y = (x[:, :3] > 0.2).astype("float32")
    y[:10] = 1.0
    with run.strategy.scope():
        model = network(3, "sigmoid")
        model.compile(sgd(0.5), keras.losses.Dice())
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def regularizers(run: ProgramRun) -> Values:
    """Regularizers of weights, which the loss counts once."""
    x, y = regression(44)
    with run.strategy.scope():
        model = network(kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02), bias_regularizer="l2")
        model.compile(sgd(), "mse")
    record = model.fit(dataset(x, y), epochs=3, verbose=0)
    return trained(model, record) | evaluated(model, x, y)


@program()
def loss_added_in_a_layer(run: ProgramRun) -> Values:
    """A layer that calls `add_loss`, and an activity regularizer."""

    class Calm(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * ops.mean(ops.square(inputs)))
            return inputs

    x, y = regression(43)
    with run.strategy.scope():
        layers = [keras.layers.Dense(6, "tanh", activity_regularizer="l2"), Calm(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(sgd(), "mse")
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))


@program()
def sample_weights(run: ProgramRun) -> Values:
    """A weight for each example, in the loss and in a weighted metric."""
    x, y = regression(43)
    weight = np.linspace(0.2, 2.0, 43).astype("float32")
    with run.strategy.scope():
        model = network()
        model.compile(sgd(), "mse", weighted_metrics=["mae"])
    record = model.fit(x, y, sample_weight=weight, batch_size=16, shuffle=False, epochs=2, verbose=0)
    return trained(model, record)


@program()
def class_weights(run: ProgramRun) -> Values:
    """A weight for each class."""
    x, y = classes(44)
    with run.strategy.scope():
        model = network(3, "softmax")
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = model.fit(dataset(x, y), class_weight={0: 0.3, 1: 1.0, 2: 2.5}, epochs=2, verbose=0)
    return trained(model, record)


@program()
def masked_time_steps(run: ProgramRun) -> Values:
    """A target for each time step; the loss leaves out those that the model's mask leaves out."""
    x, _ = tokens()
    y = (x % 3).astype("int32")
    with run.strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(12, 4, mask_zero=True),
                keras.layers.LSTM(5, return_sequences=True),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return trained(model, model.fit(dataset(x, y), epochs=2, verbose=0))
