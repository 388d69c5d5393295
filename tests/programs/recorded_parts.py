"""Parts of dtrain that a plain fit of dense layers does not touch: tables, divided state, loops."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

from .common import Values
from .recorded_common import BATCH, adam, everything, model_in, numbered, rows
from .registry import Env, recording

WORDS, LENGTH = 20, 6


def divided() -> keras.optimizers.Optimizer:
    return dtrain.optim.shard_state(keras.optimizers.Adam(0.02))


def fitted(env: Env, **compiled: Any) -> Values:
    model = model_in(env, **compiled)
    record = model.fit(*rows(), batch_size=BATCH, epochs=2, verbose=0)
    return everything(model, record)


@recording("divided_state")
def _(env: Env) -> Values:
    values = fitted(env, optimizer=divided)
    # Each worker shows its own part of the moments; what they do is in the weights.
    return {name: value for name, value in values.items() if not name.startswith("optimizer_")}


class Noisy(keras.layers.Layer):
    """Multiplies by what Keras' global generator gives, which no layer holds."""

    def call(self, inputs: Any) -> Any:
        return inputs * keras.random.uniform((1, 8), 0.5, 1.5)


@recording("layers_computed_again")
def _(env: Env) -> Values:
    served = isinstance(env.strategy, dtrain.ParameterServerStrategy)  # it is refused there
    with env.strategy.scope(), contextlib.nullcontext() if served else dtrain.optim.rematerialize("full"):
        layers = [keras.layers.Dense(8, "tanh"), Noisy(), keras.layers.Dropout(0.25, seed=11)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(adam(), "mse")
    return everything(model, model.fit(*rows(), batch_size=BATCH, epochs=2, verbose=0))


@recording("rows_of_tables")
def _(env: Env) -> Values:
    words = np.random.default_rng(3).integers(0, WORDS, size=(46, LENGTH))
    with env.strategy.scope():
        inputs = keras.Input((LENGTH,), dtype="int32")
        places = keras.layers.Embedding(LENGTH, 4)(keras.ops.arange(LENGTH))
        hidden = keras.layers.Embedding(WORDS, 4, mask_zero=True)(inputs) + places
        hidden = keras.layers.LSTM(4, activity_regularizer="l2")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(WORDS, activation="softmax")(hidden))
        model.compile(dtrain.optim.LazyAdam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = model.fit(words, words[:, 0], batch_size=BATCH, epochs=2, verbose=0)
    return everything(model, record)


@recording("loop_of_ones_own")
def _(env: Env) -> Values:
    model = model_in(env)
    optimizer = model.optimizer

    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def of_all(batch: Any) -> Any:
        return env.strategy.reduce("SUM", env.strategy.run(step, args=(batch,)), axis=None)

    data = env.strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(rows(48)).batch(BATCH)
    )
    losses = [float(of_all(batch)) for _ in range(2) for batch in data]
    # Moving statistics are each worker's own in such a loop.
    values = numbered("model", model.trainable_variables) | numbered("optimizer", optimizer.variables)
    return values | {"losses": np.asarray(losses)}
