"""Update the weights once every few batches: by the optimizer's own argument, and in a loop by hand.

Run `python examples/gradient_accumulation.py [STRATEGY]`, or under
`dtrain launch --workers 2 examples/gradient_accumulation.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

ACCUMULATED = 4
GLOBAL_BATCH = 16
UPDATES = 12


def make_data() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    points = random.normal(size=(ACCUMULATED * GLOBAL_BATCH * UPDATES, 6)).astype("float32")
    labels = (points[:, 0] + points[:, 1] > 0).astype("int32")
    return tf.data.Dataset.from_tensor_slices((points, labels)).batch(GLOBAL_BATCH)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )


def with_fit(strategy: Any) -> list[np.ndarray]:
    """Keras' optimizers accumulate by themselves."""
    with strategy.scope():
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=ACCUMULATED),
            loss="sparse_categorical_crossentropy",
        )
    model.fit(make_data(), epochs=1, verbose=0)
    return model.get_weights()


def by_hand(strategy: Any) -> tuple[list[np.ndarray], list[float]]:
    """Replicas return gradients; their mean over replicas and batches is applied once, across them."""
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(0.01)

    def replica_gradients(batch: Any) -> Any:
        points, labels = batch
        with tf.GradientTape() as tape:
            each = keras.losses.sparse_categorical_crossentropy(labels, model(points, training=True))
            loss = tf.reduce_mean(each) / ACCUMULATED
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def update(batches: Iterator[Any]) -> Any:
        loss = 0.0
        gradients = [tf.zeros_like(variable) for variable in model.trainable_variables]
        for _ in range(ACCUMULATED):
            replica_losses, found = strategy.run(replica_gradients, args=(next(batches),))
            loss += strategy.reduce(tf.distribute.ReduceOp.MEAN, replica_losses, axis=None)
            for i, gradient in enumerate(found):
                gradients[i] += strategy.reduce(tf.distribute.ReduceOp.MEAN, gradient, axis=None)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = iter(strategy.experimental_distribute_dataset(make_data()))
    losses = [float(update(batches)) for _ in range(UPDATES)]
    return model.get_weights(), losses


def main(strategy_name: str = "auto") -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    fitted = with_fit(strategy)
    weights, losses = by_hand(strategy)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(fitted, weights, strict=True))
    if dtrain.is_chief():
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; the two ways differ by {apart:.1e} at most")
    return {"losses": losses, "weights": weights, "apart": apart}


if __name__ == "__main__":
    main(*sys.argv[1:2])
