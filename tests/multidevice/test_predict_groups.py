"""With one replica, `predict` predicts many small batches in a call, each as if it were alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain


class BatchMean(keras.layers.Layer):  # type: ignore[misc]
    """What it returns for an example depends on the batch in which the example is."""

    def call(self, x: Any) -> Any:
        """The batch's mean is taken from each row."""
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model with a `predict_step` of its own."""

    def predict_step(self, data: Any) -> Any:
        """Several outputs, one of them without examples."""
        found = super().predict_step(data)
        return {"twice": 2 * found, "highest": tf.reduce_max(found, keepdims=True)}


class Positive(keras.Model):  # type: ignore[misc]
    """A model whose outputs have another number of rows in each batch."""

    def predict_step(self, data: Any) -> Any:
        """The rows that are positive."""
        found = super().predict_step(data)
        return tf.boolean_mask(found, found[:, 0] > 0)


class OwnFunction(keras.Model):  # type: ignore[misc]
    """A model whose predict function is the user's own."""

    def make_predict_function(self, force: bool = False) -> Any:
        """Sevens, whatever the model computes."""
        if self.predict_function is None or force:
            super().make_predict_function(force)
            made = self.predict_function
            self.predict_function = lambda batches: 0 * made(batches) + 7
        return self.predict_function


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the shape of each batch's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """At each batch."""
        self.shapes.append((batch, tuple(logs["outputs"].shape)))


def model_of(kind: type[keras.Model], **settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    x = keras.Input((3,))
    y = keras.layers.Dense(2)(BatchMean()(x))
    model = kind(x, y)
    model.compile("sgd", "mse", **settings)
    return model


X = np.random.default_rng(0).normal(size=(90, 3)).astype("float32")
CASES = [
    # All batches full; a short last one; more than are read at once; less than a batch; some of them.
    {"x": X, "batch_size": 9},
    {"x": X, "batch_size": 7},
    {"x": X, "batch_size": 2},
    {"x": X[:5], "batch_size": 9},
    {"x": X, "batch_size": 2, "steps": 40},
]


def in_groups(model: Any) -> Any:
    """The model, whose predict function takes groups however long they take."""
    model.make_predict_function()
    model.predict_function.longest = float("inf")
    return model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (keras.Model, {}),
        (keras.Model, {"jit_compile": True}),
        (keras.Model, {"run_eagerly": True}),
        (keras.Model, {"steps_per_execution": 3}),
        (OwnStep, {}),
        (Positive, {}),
        (OwnFunction, {}),
    ],
)
def test_predictions_are_stock_keras(kind: type[keras.Model], settings: dict[str, Any]) -> None:
    stock = model_of(kind, **settings)
    with dtrain.OneDeviceStrategy("CPU:0").scope():
        ours = in_groups(model_of(kind, **settings))
    for case in CASES:
        wanted, found = (each.predict(verbose=0, **case) for each in (stock, ours))
        keras.tree.map_structure(
            lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-4, atol=1e-6), wanted, found
        )


def test_groups_are_as_large_as_what_is_read_at_once() -> None:
    with dtrain.OneDeviceStrategy("CPU:0").scope():
        model = in_groups(model_of(keras.Model))
    function, seen = model.predict_function, []

    def noted(batches: list[Any]) -> Any:
        seen.append([getattr(each, "steps", 1) for each in batches])
        return function(batches)

    noted.at_once = function.at_once  # type: ignore[attr-defined]
    model.predict_function = noted
    for case in CASES:
        model.predict(verbose=0, **case)
    assert seen == [[10], [12], [1], [32], [13], [1], [32], *[[1]] * 8]
    seen.clear()
    tf.config.run_functions_eagerly(True)
    try:
        model.predict(verbose=0, **CASES[0])
    finally:
        tf.config.run_functions_eagerly(False)
    assert seen == [[1]] * 10


def test_a_step_of_a_group_runs_in_a_replica() -> None:
    strategy = dtrain.MirroredStrategy(["CPU:0"])
    seen = []

    class Looks(keras.Model):  # type: ignore[misc]
        def predict_step(self, data: Any) -> Any:
            seen.append((tf.distribute.get_strategy(), tf.distribute.get_replica_context() is not None))
            return super().predict_step(data)

    with strategy.scope():
        model = in_groups(model_of(Looks))
        model.predict(verbose=0, **CASES[0])
    assert seen
    assert all(found is strategy and inside for found, inside in seen)


def test_a_callback_sees_each_batch() -> None:
    with dtrain.OneDeviceStrategy("CPU:0").scope():
        model = in_groups(model_of(keras.Model))
    seen = Seen()
    model.predict(X, batch_size=40, verbose=0, callbacks=[seen])
    assert seen.shapes == [(0, (40, 2)), (1, (40, 2)), (2, (10, 2))]
