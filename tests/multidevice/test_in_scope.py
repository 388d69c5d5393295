"""What a program computes in a strategy's scope, but in no step, is what it computes without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain

LABELS = np.array([0, 1, 2, 1, 0, 2, 2], dtype="int32")
SCORES = np.random.default_rng(0).dirichlet(np.ones(3), size=7).astype("float32")
WEIGHTS = np.linspace(0, 2, 7).astype("float32")


def masked(scores: np.ndarray) -> Any:
    found = tf.constant(scores)
    found._keras_mask = tf.constant([True, False, True, True, False, True, True])
    return found


KINDS = [dtrain.MirroredStrategy, dtrain.CentralStorageStrategy]
LOSSES: dict[str, Callable[[], Any]] = {
    "mean": lambda: keras.losses.SparseCategoricalCrossentropy()(LABELS, SCORES),
    "weighted": lambda: keras.losses.SparseCategoricalCrossentropy()(LABELS, SCORES, WEIGHTS),
    "of_weights": lambda: keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")(
        LABELS, SCORES, WEIGHTS
    ),
    "masked": lambda: keras.losses.MeanSquaredError()(np.eye(3, dtype="float32")[LABELS], masked(SCORES)),
    "sum": lambda: keras.losses.SparseCategoricalCrossentropy(reduction="sum")(LABELS, SCORES),
    "in_a_function": lambda: tf.function(keras.losses.SparseCategoricalCrossentropy())(LABELS, SCORES),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_whole_batch(name: str, kind: Any) -> None:
    alone = LOSSES[name]()
    with kind().scope():
        np.testing.assert_allclose(LOSSES[name](), alone, rtol=1e-6)


def compute_loss(model: keras.Model) -> Any:
    return model.compute_loss(y=tf.constant(LABELS), y_pred=model(tf.constant(SCORES)))


def test_a_models_loss_is_that_of_the_whole_batch() -> None:
    found = []
    for strategy in (dtrain.OneDeviceStrategy("/cpu:0"), dtrain.MirroredStrategy()):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(3, "softmax", kernel_regularizer="l2")]
            )
            model.compile("sgd", "sparse_categorical_crossentropy")
            found.append(float(compute_loss(model)))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class Right(keras.metrics.Metric):
    """Counts in integers."""

    def __init__(self, dtype: str) -> None:
        super().__init__(name="right")
        self.right = self.add_weight(name="right", shape=(2,), initializer="ones", dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        right = tf.equal(y_true, tf.cast(tf.argmax(y_pred, axis=1), y_true.dtype))
        counts = tf.stack([tf.reduce_sum(tf.cast(right, self.right.dtype)), -1])
        self.right.assign_add(counts)

    def result(self) -> Any:
        return self.right.value


METRICS: dict[str, Callable[[], Any]] = {
    "MeanIoU": lambda: keras.metrics.MeanIoU(num_classes=3, sparse_y_pred=False),
    "int32": lambda: Right("int32"),
    "int64": lambda: Right("int64"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_counts_in_integers_loses_none(name: str, kind: Any) -> None:
    found = []
    for strategy in (dtrain.OneDeviceStrategy("/cpu:0"), kind()):
        with strategy.scope():
            metric = METRICS[name]()
            for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
                metric.update_state(LABELS[rows], SCORES[rows])
            found.append(np.asarray(metric.result()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_a_sum_is_whole_from_the_beginning_written_and_restored(
    dtype: str, kind: Any, tmp_path: Path
) -> None:
    whole = np.array([7, -7], dtype=dtype) + (2**60 if dtype == "int64" else 0)
    with kind().scope():
        variables = [
            tf.Variable(
                np.array([1, 2], dtype=dtype),
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for _ in range(2)
        ]
    written, restored = variables
    np.testing.assert_array_equal(written.numpy(), [1, 2])
    tf.function(written.assign)(whole)
    np.testing.assert_array_equal(written.numpy(), whole)
    path = tf.train.Checkpoint(v=written).write(str(tmp_path / "state"))
    tf.train.Checkpoint(v=restored).read(path).assert_consumed()
    np.testing.assert_array_equal(restored.numpy(), whole)
