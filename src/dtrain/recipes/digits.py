"""A complete training program: a small CNN learns handwritten digits under any strategy.

It is an example to read and to copy from, not a framework: ordinary Keras, and the steps that all recipes
share (`running.py`). Run it alone (`python -m dtrain.recipes.digits`), as `dtrain train digits`, or in many
processes (`dtrain launch --workers 2 -m dtrain.recipes.digits`; with `--ps 1`, on parameter servers). When
the launcher restarts it, it resumes from its last checkpoint.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtrain.data import Digits, Examples, load_digits
from dtrain.recipes.options import RecipeOptions
from dtrain.recipes.running import Data, TrainingRun, show

_LABEL_SMOOTHING = 0.1
_CLASSES = 10


def make_data(digits: Digits, batch: int) -> Data:
    """The data sets: batches of images (b, 8, 8, 1) and one-hot labels (b, 10).

    The order of the training images changes each epoch. It depends on `keras.utils.set_random_seed`, so it is
    the same in every process.
    """

    def dataset(examples: Examples) -> tf.data.Dataset:
        labels = keras.utils.to_categorical(examples.labels, _CLASSES)
        return tf.data.Dataset.from_tensor_slices((examples.images, labels))

    return Data(
        train=dataset(digits.train).shuffle(len(digits.train.labels)).batch(batch),
        validation=dataset(digits.validation).batch(batch),
        test=dataset(digits.test).batch(batch),
        examples=len(digits.train.labels),
    )


def build_model(rate: Any, accumulation: int | None = None) -> keras.Model:
    """A compiled CNN of 4 convolutions.

    It has no random layer, so every synchronous strategy trains it to the same numbers.

    Args:
        rate: a learning rate or a schedule.
        accumulation: the number of micro-batches of one weight update; None means one.
    """
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(2.0, offset=-0.6),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(96, 3, padding="same", activation="relu"),
            layers.Conv2D(96, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(_CLASSES, dtype="float32"),  # float32 also with mixed precision
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(rate, gradient_accumulation_steps=accumulation),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=_LABEL_SMOOTHING),
        metrics=["accuracy"],
    )
    return model


def train(options: RecipeOptions) -> str:
    """Train and test the model, and write the files of the run. Every process of the job must call this.

    Returns:
        A summary of the run, the same in every process. All files are complete when this returns.

    Raises:
        ConfigurationError: before training, if the batches do not fit the number of replicas or the run
            directory cannot be used for the run.
    """
    run = TrainingRun("digits", options)
    data = make_data(load_digits(), run.batches.micro_batch)
    rate = run.schedule(len(data.train))
    return run.train(data, lambda: build_model(rate, run.accumulation))


if __name__ == "__main__":
    show(train(RecipeOptions.parse()))
