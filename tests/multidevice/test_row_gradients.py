"""Gradients that name rows of a table, under two replicas, for optimizers that square them."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import dtrain

LENGTH, WORDS, WIDTH = 6, 11, 4
_RANDOM = np.random.default_rng(0)
TOKENS = _RANDOM.integers(0, WORDS, size=(9, LENGTH)).astype("int32")
TARGETS = _RANDOM.normal(size=(9, 1)).astype("float32")
DISTANCES = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))


class Lookups(layers.Layer):
    """Rows of the examples and of positions from one table; positions, repeated ones, and distinct ones."""

    def __init__(self, *, few: bool) -> None:
        super().__init__()
        self.few = few
        self.both, self.named_once = (layers.Embedding(WORDS, WIDTH) for _ in range(2))
        self.distances, self.counted = (layers.Embedding(LENGTH, WIDTH) for _ in range(2))

    def build(self, shape: Any) -> None:
        for table in self._flatten_layers(include_self=False):
            table.build()

    def call(self, tokens: Any) -> Any:
        x = self.both(tokens) + self.both(ops.arange(LENGTH)) + self.both(ops.arange(LENGTH)[::-1])
        if self.few:
            return x
        x += ops.mean(self.distances(DISTANCES), axis=0) + self.counted(tf.range(tf.shape(tokens)[1]))
        rows, places = tf.unique(tf.reshape(tokens, [-1]))
        return x + tf.reshape(tf.gather(self.named_once(rows), places), [-1, LENGTH, WIDTH])


def model(*, few: bool = False) -> keras.Model:
    body = [Lookups(few=few), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *body])


def fitted(strategy: tf.distribute.Strategy, **compiled: Any) -> Any:
    trained = model(few=bool(compiled))
    trained.compile(keras.optimizers.Adam(0.01, clipnorm=0.1, amsgrad=True), "mse", **compiled)
    # The last batch has one example, so that a replica has none.
    trained.fit(TOKENS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return trained.get_weights()


def compiled_by_xla(strategy: tf.distribute.Strategy) -> Any:
    return fitted(strategy, jit_compile=True)


def custom_loop(strategy: tf.distribute.Strategy) -> Any:
    trained, optimizer = model(), keras.optimizers.RMSprop(0.01)

    def replica_step(batch: Any) -> Any:
        tokens, targets = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((trained(tokens, training=True) - targets) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=8)
        gradients = tape.gradient(loss, trained.trainable_variables)
        optimizer.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))

    @tf.function
    def step(batch: Any) -> None:
        strategy.run(replica_step, args=(batch,))

    data = tf.data.Dataset.from_tensor_slices((TOKENS[:8], TARGETS[:8])).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
    return trained.get_weights()


@pytest.mark.parametrize(
    "program", [fitted, pytest.param(compiled_by_xla, marks=pytest.mark.long), custom_loop]
)
def test_rows_are_squared_as_on_one_device(program: Any) -> None:
    found: list[Any] = []
    for strategy in (tf.distribute.get_strategy(), dtrain.MirroredStrategy()):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        with strategy.scope() if found else contextlib.nullcontext():
            found.append(program(strategy))
    for alone, mirrored in zip(*found, strict=True):
        np.testing.assert_allclose(mirrored, alone, rtol=2e-4, atol=2e-6)
