"""Functions of the user's own inside a step: lookups, losses, state and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import dtrain

LENGTH, WORDS, WIDTH = 6, 11, 4
_RANDOM = np.random.default_rng(0)
TOKENS = _RANDOM.integers(0, WORDS, size=(44, LENGTH)).astype("int32")  # batches of 16, 16 and 12
TARGETS = _RANDOM.normal(size=(44, 1)).astype("float32")


class Words(keras.Model):
    """Rows of words and of positions, a layer with an activity's loss, and a variable that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = layers.Embedding(WORDS, WIDTH), layers.Embedding(LENGTH, WIDTH)
        self.hidden = layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.1))
        self.out = layers.Dense(1)
        self.steps = keras.Variable(0, dtype="int32", trainable=False, name="steps")
        self.queue = keras.Variable(np.zeros(16, "float32"), trainable=False, name="queue")

    def call(self, tokens: Any) -> Any:
        rows = self.words(tokens) + self.positions(ops.arange(LENGTH))
        return self.out(self.hidden(ops.reshape(rows, (-1, LENGTH * WIDTH))))

    @tf.function
    def loss_of(self, tokens: Any, targets: Any) -> Any:
        loss = tf.reduce_mean((self(tokens, training=True) - targets) ** 2) + sum(self.losses)
        if loss > 0.5:  # converted by AutoGraph
            loss = loss * 2.0
        return loss


class Forward(Words):
    def train_step(self, batch: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*batch)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": loss}


class InCondition(Words):
    """The forward pass stands in a branch, where its lookups are."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        tokens, targets = batch
        with tf.GradientTape() as tape:
            predicted = tf.cond(
                tf.shape(targets)[1] > 0, lambda: self(tokens, training=True), lambda: 0.0 * targets
            )
            branches = [lambda: predicted, lambda: predicted + tf.reduce_sum(self.positions(ops.arange(3)))]
            predicted = tf.switch_case(tf.shape(targets)[1], branches)
            loss = tf.reduce_mean((predicted - targets) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": loss}


class Whole(Words):
    @tf.function
    def learn(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*batch)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.steps.assign_add(1)
        return loss, 3

    def train_step(self, batch: Any) -> dict[str, Any]:
        loss, three = self.learn(batch)
        return {"error": loss, "three": tf.cast(three, three.dtype)}


class Queue(Forward):
    @tf.function
    def keep(self, tokens: Any) -> None:
        self.queue.assign(tf.concat([tf.cast(tokens[:, 0], tf.float32), self.queue.value], axis=0)[:16])

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.keep(batch[0])
        return super().train_step(batch)


def fitted(strategy: Any, kind: Callable[[], Any]) -> tuple[Any, Any]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = kind()
        model.compile(keras.optimizers.Adam(0.01, amsgrad=True))
    return model, model.fit(TOKENS, TARGETS, batch_size=16, epochs=2, shuffle=False, verbose=0).history


CENTRAL = pytest.param(dtrain.CentralStorageStrategy, Forward, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*((dtrain.MirroredStrategy, kind) for kind in (Forward, Whole, InCondition, Queue)), CENTRAL],
)
def test_a_function_of_a_step_is_part_of_it(strategy: Any, kind: Any) -> None:
    alone, expected = fitted(tf.distribute.get_strategy(), kind)
    model, found = fitted(strategy(), kind)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, err_msg=name)
    for a, b in zip(model.variables, alone.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=2e-6, err_msg=a.path)
