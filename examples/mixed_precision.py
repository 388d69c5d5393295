"""Compute in 16 bits and keep the weights in 32, with the loss scaled so that small gradients survive.

Run `python examples/mixed_precision.py [STRATEGY]`; on GPUs with tensor cores it is faster, on a CPU it only
shows how.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

import dtrain


def main(strategy_name: str = "auto", epochs: int = 3, policy: str = "mixed_float16") -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    random = np.random.default_rng(2)
    points = random.normal(size=(256, 16)).astype("float32")
    labels = points[:, :4].argmax(axis=1)

    keras.utils.set_random_seed(2)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((16,)),
                    keras.layers.Dense(32, activation="relu"),
                    # The result in 32 bits: a softmax of float16 loses too much.
                    keras.layers.Dense(4, activation="softmax", dtype="float32"),
                ]
            )
            # compile() would wrap the optimizer by itself; said here to choose the first scale.
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), initial_scale=2.0**12
            )
            model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        history = model.fit(points, labels, batch_size=32, epochs=epochs, verbose=0)
    finally:
        keras.config.set_dtype_policy(before)

    hidden = model.layers[0]
    scale = float(optimizer.dynamic_scale.numpy())
    if dtrain.is_chief():
        accuracy = history.history["accuracy"][-1]
        kinds = f"computed in {hidden.compute_dtype}, kept in {hidden.variable_dtype}"
        print(f"{kinds}: accuracy {accuracy:.3f}, loss scale {scale:g}")
    return {"losses": history.history["loss"], "compute_dtype": hidden.compute_dtype}


if __name__ == "__main__":
    main(*sys.argv[1:2])
