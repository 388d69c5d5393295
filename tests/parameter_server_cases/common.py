"""Small data and models that the cases share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from dtrain.engine.parameter_server import block_sizes

ROWS, BATCH, CLASSES = 330, 32, 3
STEPS = -(-ROWS // BATCH)  # the last batch has 10 rows


class Examples(keras.metrics.Metric):
    """How many examples were seen, in an integer."""

    def __init__(self, name: str = "examples", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.seen = self.add_weight(name="seen", shape=(), dtype="int64", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(tf.cast(tf.shape(y_true)[0], tf.int64))

    def result(self) -> Any:
        return self.seen + 0  # not the variable itself, which goes on counting


def data(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of shape (rows, 10) and classes of shape (rows,)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 10)).astype("float32"), rng.integers(0, CLASSES, rows)


def batches(rows: int = ROWS) -> tf.data.Dataset:
    """The data in batches, unshuffled."""
    return tf.data.Dataset.from_tensor_slices(data(rows)).batch(BATCH)


def classifier(strategy: Any, optimizer: Any, **arguments: Any) -> Any:
    """A small model with dense layers, compiled with a loss, accuracy and a count of examples.

    Args:
        strategy: what it is made under.
        optimizer: a name, or what makes one.
        **arguments: more for `compile`.
    """
    with strategy.scope():
        layers = [keras.layers.Input((10,)), keras.layers.Dense(8, "relu")]
        model = keras.Sequential([*layers, keras.layers.Dense(CLASSES, dtype="float32")])
        model.compile(
            optimizer=optimizer() if callable(optimizer) else optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy"), Examples()],
            **arguments,
        )
    return model


@contextlib.contextmanager
def sizes_by_counts() -> Iterator[None]:
    """Has the number of steps alone decide how large blocks are and when their loops are unrolled.

    By default, both also depend on how long steps take.
    """
    with mock.patch.multiple(block_sizes, _FAST=1e6, _BLOCK_SECONDS=1e6, _MOST_BLOCK_SECONDS=1e6):
        yield


def iterations(model: Any) -> int:
    """How many steps the optimizer has counted."""
    return int(model.optimizer.iterations.numpy())


def assert_close(found: Any, expected: Any, rtol: float = 2e-4, atol: float = 1e-6) -> None:
    """Lists of arrays are equal within one device's tolerance."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
