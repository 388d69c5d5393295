"""Measure how many examples a second one device and several replicas train, on the same global batches.

Run `python examples/benchmark.py [STRATEGY ...]`; replicas that share one CPU are no faster, so it takes GPUs
to make it worth reading.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain


def make_cnn() -> keras.Model:
    keras.utils.set_random_seed(8)
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def examples_per_second(strategy: Any, data: tf.data.Dataset, examples: int, epochs: int) -> float:
    """The first epoch, which traces, is not counted."""
    with strategy.scope():
        model = make_cnn()
    model.fit(data, epochs=1, verbose=0)
    start = time.perf_counter()
    model.fit(data, epochs=epochs, verbose=0)
    return epochs * examples / (time.perf_counter() - start)


def main(*names: str, examples: int = 256, epochs: int = 2) -> dict[str, float]:
    strategies = {name: dtrain.strategy(name) for name in ("one_device", *(names or ("mirrored",)))}
    random = np.random.default_rng(8)
    images = random.normal(size=(examples, 32, 32, 3)).astype("float32")
    labels = random.integers(0, 10, examples)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64).cache().prefetch(tf.data.AUTOTUNE)
    speeds: dict[str, float] = {}
    for name, strategy in strategies.items():
        speeds[name] = examples_per_second(strategy, data, examples, epochs)
        print(
            f"{name:16} {strategy.num_replicas_in_sync} replicas  {speeds[name]:8.0f} examples/s  "
            f"{speeds[name] / speeds['one_device']:.2f} times one device"
        )
    return speeds


if __name__ == "__main__":
    main(*sys.argv[1:])
