"""Data, models and results that many programs share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

Values = dict[str, Any]


def regression(count: int = 48, features: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and a target that is far from zero, so that no gradient is."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)).astype("float32")
    w = np.linspace(-1.0, 1.5, features, dtype="float32")[:, None]
    # Examples late in the data are heavier, so that wrong weights of halves of a batch show.
    y = np.tanh(x @ w) + 1.0 + np.linspace(0, 1.5, count, dtype="float32")[:, None]
    return x, y.astype("float32")


def classes(
    count: int = 48, features: int = 4, kinds: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)).astype("float32")
    y = (np.abs(x[:, 0]) * 1.7 + np.linspace(0, 1.2, count)).astype("int32") % kinds
    return x, y


def tokens(count: int = 40, length: int = 6, words: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences padded with zeros to unequal lengths."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, words, size=(count, length))
    for row, used in enumerate(rng.integers(2, length + 1, size=count)):
        x[row, used:] = 0
    y = ((x > words // 2).sum(axis=1) % 3).astype("int32")
    return x.astype("int32"), y


def images(count: int = 30, side: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, side, side, 2)).astype("float32") + np.linspace(-1, 1, count)[
        :, None, None, None
    ].astype("float32")
    y = rng.integers(0, 3, size=count).astype("int32")
    return x, y


def mlp(features: int = 4, outputs: int = 1, activation: str | None = None, **first: Any) -> keras.Model:
    """Two layers; tanh, so that no unit can be dead and no kink can turn a rounding into a jump."""
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(6, activation="tanh", **first),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


def sgd(rate: float = 0.1, **options: Any) -> keras.optimizers.Optimizer:
    """Momentum SGD, the default of these programs: unlike Adam it shows a gradient of the wrong scale."""
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def dataset(*arrays: Any, batch: int = 16, drop: bool = False) -> tf.data.Dataset:
    pieces = arrays[0] if len(arrays) == 1 else tuple(arrays)
    return tf.data.Dataset.from_tensor_slices(pieces).batch(batch, drop_remainder=drop)


def weights(model: Any, prefix: str = "w") -> Values:
    return {f"{prefix}{i}": value for i, value in enumerate(model.get_weights())}


def history(record: Any, prefix: str = "history_") -> Values:
    return {f"{prefix}{key}": np.asarray(value, "float64") for key, value in record.history.items()}


def named(logs: dict[str, Any], prefix: str) -> Values:
    """Logs as numbers. Before Keras 3.14, the compiled metrics may be a dictionary of their own in them."""
    flat = {f"{prefix}{key}": value for key, value in logs.items() if not isinstance(value, dict)}
    inner = [named(value, prefix) for value in logs.values() if isinstance(value, dict)]
    return {key: float(value) for each in (flat, *inner) for key, value in each.items()}


def outcome(model: Any, record: Any, x: Any = None, y: Any = None, batch: int = 16) -> Values:
    """All that a training leaves: weights, history, steps, and what it then evaluates to and predicts."""
    values = weights(model) | history(record) | {"iterations": int(model.optimizer.iterations.numpy())}
    if x is not None:
        values |= named(model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True), "evaluate_")
        predicted = model.predict(x, batch_size=batch, verbose=0)
        for i, part in enumerate(keras.tree.flatten(predicted)):
            values[f"predict_{i}"] = part
    return values


class BatchLogs(keras.callbacks.Callback):
    """Records what every batch reports."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[list[float]] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.steps.append(batch)
        self.logs.append([float(value) for _, value in sorted((logs or {}).items())])

    def values(self) -> Values:
        return {"batch_logs": np.asarray(self.logs), "batch_steps": np.asarray(self.steps)}
