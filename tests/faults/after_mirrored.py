"""Two strategies in one program: the mirrored one is made in every process, before it serves.

Nothing that stood before the cluster can be used after it, so that only one of the two can train.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import dtrain


def network() -> Any:
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Dense(64, activation="relu", input_shape=(10,)), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    return model


def main() -> dict[str, Any]:
    with dtrain.MirroredStrategy().scope():
        network()
    partitioner = dtrain.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=(256 << 10), max_shards=2
    )
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = dtrain.experimental.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    with strategy.scope():
        model = network()
    x = np.random.default_rng(0).random((320, 10))
    record = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=32, epochs=3, verbose=0)
    return {"losses": record.history["loss"], "updates": int(model.optimizer.iterations)}
