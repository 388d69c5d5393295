"""Train a convolutional network on bytes through a cached, shuffled and prefetched pipeline.

Run `python examples/image_classification.py [STRATEGY]`, or under
`dtrain launch --workers 2 examples/image_classification.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

BATCH_PER_REPLICA = 16


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 32 by 32 bytes in three colours; the label says which colour is strongest."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, count)
    images = random.integers(0, 160, (count, 32, 32, 3))
    images[np.arange(count), :, :, labels] += 40
    return images.astype("uint8"), labels


def main(strategy_name: str = "auto", epochs: int = 3) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    keras.utils.set_random_seed(10)

    def to_floats(image: Any, label: Any) -> Any:
        return tf.cast(image, tf.float32) / 255.0, label

    examples = tf.data.Dataset.from_tensor_slices(make_images(192, seed=10)).map(to_floats).cache()
    train = examples.shuffle(192, seed=10).batch(global_batch).prefetch(tf.data.AUTOTUNE)
    test = tf.data.Dataset.from_tensor_slices(make_images(64, seed=11)).map(to_floats).batch(global_batch)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(train, epochs=epochs, verbose=0)
    result = model.evaluate(test, return_dict=True, verbose=0)
    if dtrain.is_chief():
        print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {result['accuracy']:.3f}")
    return {"losses": history.history["loss"], "test": result}


if __name__ == "__main__":
    main(*sys.argv[1:2])
