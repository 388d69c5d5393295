"""Write the asynchronous loop by hand: the chief schedules steps, whichever worker is free computes the next.

Run `dtrain launch --workers 2 --ps 1 examples/parameter_server_loop.py`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

BATCH = 32
STEPS_PER_EPOCH = 40


def make_data() -> tf.data.Dataset:
    """Points, and a noisy linear function of them, in batches without end."""
    random = np.random.default_rng(0)
    points = random.normal(size=(STEPS_PER_EPOCH * BATCH, 10)).astype("float32")
    values = points @ random.normal(size=(10, 1)) + 0.1 * random.normal(size=(len(points), 1))
    data = tf.data.Dataset.from_tensor_slices((points, values.astype("float32")))
    # Every worker makes its own: a shuffle without a seed gives each another order.
    return data.shuffle(len(points)).repeat().batch(BATCH)


def main(epochs: int = 4) -> dict[str, Any]:
    # Workers and servers serve here until the chief has ended; only the chief goes on.
    strategy = dtrain.ParameterServerStrategy()
    coordinator = dtrain.coordinator.ClusterCoordinator(strategy)

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01)

    def replica_step(batch: Any) -> Any:
        points, values = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(values, model(points, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        # The servers apply one worker's update whole before another's.
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(make_data))
    losses = []
    for epoch in range(epochs):
        # `schedule` returns at once, with the promise of a result; `join` waits for all of them.
        results = [coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS_PER_EPOCH)]
        coordinator.join()
        losses.append(float(np.mean([result.fetch() for result in results])))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    return {"losses": losses, "updates": int(optimizer.iterations), "weights": model.get_weights()}


if __name__ == "__main__":
    main()
