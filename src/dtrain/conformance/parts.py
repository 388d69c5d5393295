"""What the programs share: small data, small models, and the numbers that they return after training.

Gradients are far from zero and examples have unequal weight, so that a wrong scale or mean changes results.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.conformance.corpus import Values


def regression(count: int = 48, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and one target for each."""
    x = np.random.default_rng(0).normal(size=(count, features)).astype("float32")
    slope = np.linspace(-1.0, 1.5, features)[:, None]
    return x, (np.tanh(x @ slope) + np.linspace(1.0, 2.5, count)[:, None]).astype("float32")


def classes(count: int = 48, kinds: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the index of a class for each."""
    x = np.random.default_rng(0).normal(size=(count, 4)).astype("float32")
    return x, (np.abs(x[:, 0]) * 1.7 + np.linspace(0, 1.2, count)).astype("int32") % kinds


def binary(count: int = 44) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and a label of 0 or 1 for each."""
    x = np.random.default_rng(0).normal(size=(count, 4)).astype("float32")
    return x, (x[:, :1] + 0.5 * x[:, 1:2] > 0.1).astype("float32")


def tokens(count: int = 40, length: int = 6, words: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of unequal lengths, padded with zeros, and the index of a class for each."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, words, size=(count, length)).astype("int32")
    for row, used in enumerate(rng.integers(2, length + 1, size=count)):
        x[row, used:] = 0
    return x, ((x > words // 2).sum(axis=1) % 3).astype("int32")


def images(count: int = 30, side: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Small images, brighter towards the end, and the index of a class for each."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, side, side, 2)) + np.linspace(-1, 1, count)[:, None, None, None]
    return x.astype("float32"), rng.integers(0, 3, size=count).astype("int32")


def dataset(*arrays: Any, batch: int = 16) -> tf.data.Dataset:
    """A `tf.data` dataset in batches; the last one may be shorter."""
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(batch)


def network(outputs: int = 1, activation: str | None = None, **first: Any) -> keras.Model:
    """Two dense layers; `first` are arguments of the first."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="tanh", **first),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


def sgd(rate: float = 0.1, **options: Any) -> keras.optimizers.Optimizer:
    """SGD with momentum: unlike Adam, it shows a gradient of the wrong scale."""
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def weights(model: keras.Model, prefix: str = "weight_") -> Values:
    """The model's weights."""
    return {f"{prefix}{number}": value for number, value in enumerate(model.get_weights())}


def history(record: keras.callbacks.History, prefix: str = "history_") -> Values:
    """Losses and metrics by epoch."""
    return {f"{prefix}{key}": np.asarray(value) for key, value in record.history.items()}


def trained(model: keras.Model, record: keras.callbacks.History) -> Values:
    """The numbers of a training: weights, history, and the optimizer's count of updates."""
    return weights(model) | history(record) | {"iterations": int(np.asarray(model.optimizer.iterations))}


def evaluated(model: keras.Model, *arrays: Any, batch: int = 16) -> Values:
    """Losses and metrics on data, each example once, and the predictions in order."""
    logs = model.evaluate(dataset(*arrays, batch=batch), verbose=0, return_dict=True)
    values: Values = {f"evaluate_{key}": float(value) for key, value in logs.items()}
    return values | {"predict": model.predict(arrays[0], batch_size=batch, verbose=0)}
