"""Losses whose class overrides `__call__`, under two replicas and on one device."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain

_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(17, 4)).astype("float32")
LABELS = _RANDOM.integers(0, 3, size=17).astype("int32")
WEIGHTS = np.linspace(0, 1, 17).astype("float32")


def squares(labels: Any, y: Any) -> Any:
    return tf.reduce_mean((tf.cast(tf.reshape(labels, [-1, 1]), tf.float32) - y) ** 2, axis=1)


class SupervisedContrastive(keras.losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        y = tf.math.l2_normalize(y_pred, axis=1)
        labels = tf.reshape(y_true, [-1, 1])
        same = tf.cast(tf.equal(labels, tf.transpose(labels)), tf.float32)
        same /= tf.reduce_sum(same, axis=1, keepdims=True)
        logits = tf.matmul(y, y, transpose_b=True) * 2.0
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(same, logits))


class RootOfMean(keras.losses.Loss):
    """Changes what Keras' own `__call__` gives."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squares(y_true, y_pred)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.sqrt(super().__call__(y_true, y_pred, sample_weight))


class WeightedMean(keras.losses.Loss):
    """A mean over the examples, until there are weights."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        each = squares(y_true, y_pred)
        weights = tf.ones_like(each) if sample_weight is None else sample_weight
        return tf.reduce_sum(each * weights) / tf.reduce_sum(weights)


class Sum(keras.losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 0.1 * tf.reduce_sum(squares(y_true, y_pred))


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def fitted(loss: keras.losses.Loss, weights: Any, kind: Any) -> list[Any]:
    inputs = keras.Input((4,))
    model = kind(inputs, keras.layers.Dense(3)(inputs))
    model.compile(keras.optimizers.SGD(0.1), loss)
    # The last batch has one example, so that a replica has none.
    fit = model.fit(X, LABELS, 8, sample_weight=weights, epochs=2, shuffle=False, verbose=0)
    return [fit.history["loss"], model.evaluate(X, LABELS, 8, verbose=0), *model.get_weights()]


CASES = [
    (SupervisedContrastive, None, keras.Model),
    (RootOfMean, None, keras.Model),
    (WeightedMean, WEIGHTS, keras.Model),
    pytest.param(SupervisedContrastive, None, OwnStep, marks=pytest.mark.long),
    (Sum, None, OwnStep),
]


@pytest.mark.filterwarnings("error:.* neither a mean nor a sum")
@pytest.mark.parametrize(("loss", "weights", "kind"), CASES)
def test_a_loss_with_a_call_of_its_own_gives_one_devices_numbers(loss: Any, weights: Any, kind: Any) -> None:
    found: list[Any] = []
    for strategy in (tf.distribute.get_strategy(), dtrain.MirroredStrategy()):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        with strategy.scope() if found else contextlib.nullcontext():
            found.append(fitted(loss(), weights, kind))
    for alone, mirrored in zip(*found, strict=True):
        np.testing.assert_allclose(mirrored, alone, rtol=2e-4, atol=1e-6)
