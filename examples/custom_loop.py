"""Write the loop by hand: a replica's step is a `tf.function`, run by the strategy inside another.

Run `python examples/custom_loop.py [STRATEGY]`, or `dtrain launch --workers 2 examples/custom_loop.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

GLOBAL_BATCH = 32


def make_data(examples: int = 256) -> tf.data.Dataset:
    """Points, and a noisy linear function of them, in global batches."""
    random = np.random.default_rng(0)
    points = random.normal(size=(examples, 10)).astype("float32")
    values = points @ random.normal(size=(10, 1)) + 0.1 * random.normal(size=(examples, 1))
    return tf.data.Dataset.from_tensor_slices((points, values.astype("float32"))).batch(GLOBAL_BATCH)


def main(strategy_name: str = "auto", epochs: int = 5) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def replica_step(batch: Any) -> Any:
        points, values = batch
        with tf.GradientTape() as tape:
            each = keras.losses.mean_squared_error(values, model(points, training=True))
            # Divided by the global batch, so that the sum over the replicas is the mean.
            loss = tf.nn.compute_average_loss(each, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce(
            tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=(batch,)), axis=None
        )

    data = strategy.experimental_distribute_dataset(make_data())
    losses = []
    for epoch in range(epochs):
        epoch_losses = [float(step(batch)) for batch in data]
        losses.append(float(np.mean(epoch_losses)))
        if dtrain.is_chief():
            print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    return {"losses": losses, "weights": model.get_weights()}


if __name__ == "__main__":
    main(*sys.argv[1:2])
