"""Classify the photographs of CIFAR-10 with a small CNN, from the archive as it is published.

Run `python examples/cifar10.py [STRATEGY [DATA]]`, or `dtrain launch --workers 2 examples/cifar10.py`. DATA
is the archive or the folder that it is in; `dtrain train cifar10` trains a larger network on it.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

import dtrain
from dtrain.data import load_cifar10

BATCH_PER_REPLICA = 64


def scaled(image: Any, label: Any) -> Any:
    return tf.cast(image, tf.float32) / 255.0, label


def make_cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main(strategy_name: str = "auto", data: str | None = None, epochs: int = 3) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    cifar10 = load_cifar10(data)

    keras.utils.set_random_seed(12)
    train = tf.data.Dataset.from_tensor_slices(tuple(cifar10.train)).map(scaled).cache()
    train = train.shuffle(len(cifar10.train.labels)).batch(global_batch).prefetch(tf.data.AUTOTUNE)
    test = tf.data.Dataset.from_tensor_slices(tuple(cifar10.test)).map(scaled).batch(global_batch)

    with strategy.scope():
        model = make_cnn()
        model.compile(
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(train, epochs=epochs, verbose=0)
    result = model.evaluate(test, return_dict=True, verbose=0)
    if dtrain.is_chief():
        print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {result['accuracy']:.3f}")
    return {"losses": history.history["loss"], "test": result}


if __name__ == "__main__":
    main(*sys.argv[1:3])
