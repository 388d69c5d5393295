"""Keep strategy, model and data in a small class of one's own, with datasets that are distributed.

Run `python examples/trainer_class.py [STRATEGY]`, or `dtrain launch --workers 2 examples/trainer_class.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain


class ImageTrainer:
    """Makes a model in a strategy's scope and trains it on global batches.

    Args:
        strategy_name: any name that `dtrain.strategy` takes.
        batch_per_replica: examples a step on each replica.
    """

    def __init__(self, strategy_name: str, *, batch_per_replica: int = 16) -> None:
        self.strategy = dtrain.strategy(strategy_name)
        self.global_batch = batch_per_replica * self.strategy.num_replicas_in_sync

    def build(self, make_model: Callable[[], keras.Model], *, rate: float = 0.001) -> None:
        """The rate is for one replica; it grows with the global batch."""
        with self.strategy.scope():
            self.model = make_model()
            self.model.compile(
                optimizer=keras.optimizers.Adam(rate * self.strategy.num_replicas_in_sync),
                loss="sparse_categorical_crossentropy",
                metrics=["accuracy"],
            )

    def distribute(self, examples: tf.data.Dataset) -> Any:
        """Single examples, as global batches that are divided already when `fit` gets them."""
        batches = examples.batch(self.global_batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        return self.strategy.experimental_distribute_dataset(batches)

    def train(
        self, examples: tf.data.Dataset, validation: tf.data.Dataset, epochs: int
    ) -> dict[str, list[float]]:
        history = self.model.fit(
            self.distribute(examples), validation_data=self.distribute(validation), epochs=epochs, verbose=0
        )
        return history.history


def make_examples(count: int, seed: int) -> tf.data.Dataset:
    """Noise with a bright square in one of four corners, which is the label."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, count)
    images = random.normal(scale=0.5, size=(count, 16, 16, 3)).astype("float32")
    for image, label in zip(images, labels, strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[row : row + 8, column : column + 8] += 1.0
    return tf.data.Dataset.from_tensor_slices((images, labels))


def make_cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )


def main(strategy_name: str = "auto", epochs: int = 3) -> dict[str, Any]:
    trainer = ImageTrainer(strategy_name)
    keras.utils.set_random_seed(7)
    trainer.build(make_cnn)
    history = trainer.train(make_examples(256, seed=7), make_examples(64, seed=8), epochs)
    if dtrain.is_chief():
        for epoch, (loss, accuracy) in enumerate(
            zip(history["loss"], history["val_accuracy"], strict=True), 1
        ):
            print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {accuracy:.3f}")
    return {"losses": history["loss"], "val_accuracy": history["val_accuracy"]}


if __name__ == "__main__":
    main(*sys.argv[1:2])
