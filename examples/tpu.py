"""Train on a TPU where there is one, and where there is none on this machine's other devices, which it says.

Run `python examples/tpu.py [NAME]` with the TPU's name, or "local" on a TPU machine; without a name the
environment is asked.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain


def main(name: str | None = None, timeout: float = 20.0) -> dict[str, Any]:
    strategy = dtrain.TPUStrategy(tpu=name, fallback="mirrored", timeout=timeout)
    replicas = strategy.num_replicas_in_sync
    random = np.random.default_rng(11)
    points = random.normal(size=(256, 8)).astype("float32")
    labels = (points.sum(axis=1) > 0).astype("int32")
    # A TPU compiles for one shape: every batch must be whole.
    data = (
        tf.data.Dataset.from_tensor_slices((points, labels))
        .repeat()
        .batch(16 * replicas, drop_remainder=True)
    )

    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(2, activation="softmax"),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.05 * replicas, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=4,
        )
    history = model.fit(data, epochs=3, steps_per_epoch=8, verbose=0)
    print(f"{type(strategy).__name__}, {replicas} replicas: accuracy {history.history['accuracy'][-1]:.3f}")
    return {"kind": type(strategy).__name__, "losses": history.history["loss"]}


if __name__ == "__main__":
    main(*sys.argv[1:2])
