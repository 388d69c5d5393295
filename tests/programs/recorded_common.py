"""Models, data and results that the programs of this package share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from .common import Values, history
from .registry import Env

ROWS, BATCH = 46, 8  # six batches, the last one short


def rows(count: int = ROWS, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Inputs whose first feature is the number of the row, and targets that depend on all of them."""
    x = np.random.default_rng(5).normal(size=(count, features)).astype("float32")
    x[:, 0] = np.arange(count) / count
    return x, np.tanh(x).sum(axis=1, keepdims=True).astype("float32")


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02)


def model_in(
    env: Env,
    kind: type[keras.Model] = keras.Model,
    optimizer: Callable[[], keras.optimizers.Optimizer] = adam,
) -> keras.Model:
    """A small model with random layers, moving statistics and a metric, compiled in the strategy's scope."""
    with env.strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.25, seed=11)(hidden)
        model = kind(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def everything(model: keras.Model, record: Any) -> Values:
    """All variables of the model, its optimizer and its metrics, and the History."""
    found = numbered("model", model.variables) | numbered("optimizer", model.optimizer.variables)
    return found | history(record)


def numbered(name: str, variables: Sequence[Any]) -> Values:
    """Values of variables, by a name and their numbers."""
    return {f"{name}_{i}": np.asarray(v) for i, v in enumerate(variables)}
