"""A CNN or a transformer of any size on generated data, for trying out machines and strategies.

The data has no meaning, but a model can learn it. Run it alone (`python -m dtrain.recipes.synthetic`), as
`dtrain train synthetic`, or in many processes (`dtrain launch --workers 2 -m dtrain.recipes.synthetic`).

The transformer trains to the same numbers under every synchronous strategy. The CNN does not: its dropout
differs between replicas, and its BatchNorm normalises each replica's shard of the batch separately.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from dtrain.data import Pipeline, synthetic_images, synthetic_texts
from dtrain.recipes.catalogue import SyntheticOptions
from dtrain.recipes.running import Data, TrainingRun, show
from dtrain.recipes.text_models import transformer

_DROPOUT = 0.5
_BLOCKS, _HEADS = 4, 8


def make_data(options: SyntheticOptions, batch: int) -> Data:
    """The data sets: batches of images (b, p, p, 3) or tokens (b, l), and integer labels (b,)."""
    train, validation, test = (
        make_examples(options, count, options.seed + part)
        for part, count in enumerate((options.size, options.size // 4, options.size // 4))
    )
    return Data(
        train=Pipeline(train, batch=batch, seed=options.seed),
        validation=Pipeline(validation, batch=batch, shuffle=False),
        test=Pipeline(test, batch=batch, shuffle=False),
        examples=options.size,
    )


def make_examples(options: SyntheticOptions, count: int, seed: int) -> tuple[Any, Any]:
    """Images (n, p, p, 3) or tokens (n, l), and labels (n,).

    Another seed gives other examples of the same task.
    """
    if options.model == "cnn":
        side = options.number("image_size")
        images = synthetic_images(count, shape=(side, side, 3), classes=options.class_count(), seed=seed)
        return images.images, images.labels
    texts = synthetic_texts(
        count,
        length=options.number("sequence_length"),
        vocabulary=options.number("vocabulary"),
        classes=options.class_count(),
        seed=seed,
    )
    return texts.tokens, texts.labels


def cnn(side: int, classes: int, width: int) -> keras.Model:
    """Three pairs of convolutions with `width // 4`, `width // 2` and `width` filters, and a hidden layer.

    Args:
        side: the height and width of an image in pixels.
        classes: the number of classes.
        width: the number of filters of the widest convolution.

    Returns:
        A model from images (b, side, side, 3) to float32 logits (b, classes).
    """
    model = keras.Sequential([keras.Input((side, side, 3))], name="cnn")
    for filters in (width // 4, width // 2, width):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.BatchNormalization())
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        if filters < width:
            model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(2 * width, activation="relu"))
    model.add(layers.Dropout(_DROPOUT))
    model.add(layers.Dense(classes, dtype="float32"))
    return model


def build_model(options: SyntheticOptions, rate: Any, accumulation: int | None = None) -> keras.Model:
    """The compiled model that the options choose; other arguments as for `texts.build_model`."""
    if options.model == "cnn":
        model = cnn(options.number("image_size"), options.class_count(), options.width)
    else:
        model = transformer(
            options.number("vocabulary"),
            options.class_count(),
            length=options.number("sequence_length"),
            width=options.width,
            blocks=_BLOCKS,
            heads=_HEADS,
        )
    model.compile(
        optimizer=keras.optimizers.Adam(rate, gradient_accumulation_steps=accumulation),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(options: SyntheticOptions) -> str:
    """Train and test the model, and write the files of the run. Every process of the job must call this.

    Returns:
        A summary of the run, the same in every process. All files are complete when this returns.

    Raises:
        ConfigurationError: before training, if the batches do not fit the number of replicas or the run
            directory cannot be used for the run.
    """
    run = TrainingRun("synthetic", options)
    data = make_data(options, run.batches.micro_batch)
    rate = run.schedule(len(data.train))
    return run.train(data, lambda: build_model(options, rate, run.accumulation))


if __name__ == "__main__":
    show(train(SyntheticOptions.parse()))
