"""Start the workers yourself, on one machine or several: each gets the cluster and its place in it.

Run `python examples/multi_worker_by_hand.py 0 HOST:PORT HOST:PORT` and, on the second host, the same with 1;
without arguments it is a job of one. `dtrain launch` does all of this on one machine.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import keras
import numpy as np

import dtrain


def main(index: str = "0", *addresses: str, epochs: int = 3) -> dict[str, Any]:
    if addresses:
        # What Kubernetes or a start script would set; it must be there before the strategy is made.
        cluster = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": int(index)}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
    strategy = dtrain.MultiWorkerMirroredStrategy()

    # Every worker must have the same data: drawn with a seed.
    random = np.random.default_rng(15)
    points = random.random((200, 10)).astype("float32")
    values = points.sum(axis=1, keepdims=True)

    keras.utils.set_random_seed(15)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((10,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
        )
        model.compile(optimizer="adam", loss="mse")
    history = model.fit(
        points, values, epochs=epochs, batch_size=16 * strategy.num_replicas_in_sync, verbose=0
    )
    losses = history.history["loss"]
    print(f"worker {dtrain.rank()} of {dtrain.world_size()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return {"losses": losses, "weights": model.get_weights()}


if __name__ == "__main__":
    main(*sys.argv[1:])
