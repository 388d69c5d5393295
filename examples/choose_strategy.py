"""Train one program under every strategy that this machine can run, and let dtrain choose one by itself.

Run `python examples/choose_strategy.py [STRATEGY ...]`; with `DTRAIN_DEVICES_PER_WORKER=2` before it, the
strategies with replicas have two.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain


def by_hand() -> Any:
    """What `dtrain.strategy("auto")` does, in its simplest form."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        return dtrain.MirroredStrategy()
    return dtrain.OneDeviceStrategy("/gpu:0" if gpus else "/cpu:0")


def train(strategy: Any) -> dict[str, float]:
    """The same global batches under any strategy, so the same numbers."""
    random = np.random.default_rng(6)
    points = random.normal(size=(100, 10)).astype("float32")
    values = np.tanh(points.sum(axis=1, keepdims=True))
    keras.utils.set_random_seed(6)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((10,)),
                keras.layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4)),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer="sgd", loss="mse")
    # 100 is not a multiple of 32: the last batch is smaller.
    data = tf.data.Dataset.from_tensor_slices((points, values)).batch(32)
    model.fit(data, epochs=2, verbose=0)
    return {"loss": model.evaluate(data, verbose=0)}


def grow_memory() -> None:
    """Take a GPU's memory as it is needed, and not all at once: others may use it. Before any strategy."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def main(*names: str) -> dict[str, Any]:
    grow_memory()
    strategies = {
        name: dtrain.strategy(name) for name in names or ("mirrored", "central_storage", "auto", "default")
    }
    strategies["by hand"] = by_hand()
    losses = {}
    for name, strategy in strategies.items():
        losses[name] = train(strategy)["loss"]
        kind = type(strategy).__name__
        print(f"{name:16} {kind:24} {strategy.num_replicas_in_sync} replicas  loss {losses[name]:.6f}")
    return {"losses": losses}


if __name__ == "__main__":
    main(*sys.argv[1:])
