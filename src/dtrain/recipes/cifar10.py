"""CIFAR-10: a residual network classifies small photographs into ten classes, with random flips and crops.

Run it alone (`python -m dtrain.recipes.cifar10`), as `dtrain train cifar10`, or in many processes (`dtrain
launch --workers 2 -m dtrain.recipes.cifar10`). `--data` names the published archive or its directory,
and `--download` downloads it.

The defaults aim at a test accuracy above 0.9: `--model resnet`, 60 epochs of AdamW in batches of 128, a
learning rate that rises to 0.001 in five epochs and falls to zero along a cosine, weight decay, and label
smoothing of 0.1. The network is that of D. Page, "How to train your ResNet", which reports 0.94, but with
half as many filters; `--width 64` gives its size. For larger batches, add `--scaling sqrt`. This recipe needs
accelerators: it has not been trained to the end, because that takes hours on CPUs. On a CPU, use
`--model small` (two convolutions and a hidden layer) for trials.

Every synchronous strategy trains both models to the numbers of one device: random augmentation depends only
on the seed, the epoch and the image, and BatchNorm is computed over all replicas.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from dtrain.data import Cifar10, Pipeline, load_cifar10
from dtrain.recipes.catalogue import Cifar10Options
from dtrain.recipes.running import Data, TrainingRun, show
from dtrain.recipes.splits import hold_out

_CLASSES = 10
_SIDE, _MARGIN = 32, 4
_LABEL_SMOOTHING = 0.1
_WEIGHT_DECAY = 0.05
_MOMENTUM = (
    0.9  # of BatchNorm; with Keras' 0.99, a short run would be tested with statistics of its first steps
)


def one_hot(example: Any) -> Any:
    """The image unchanged (uint8), and its label as a one-hot vector (10,)."""
    image, label = example
    return image, tf.one_hot(label, _CLASSES)


def flip_and_crop(example: Any, seed: Any) -> Any:
    """The image randomly flipped left to right and shifted by up to 4 pixels; `seed` (2,) decides both."""
    image, label = example
    flip, crop = tf.unstack(tf.random.split(seed, 2))
    image = tf.image.stateless_random_flip_left_right(image, flip)
    margins = [[_MARGIN, _MARGIN], [_MARGIN, _MARGIN], [0, 0]]
    image = tf.image.stateless_random_crop(tf.pad(image, margins, "REFLECT"), (_SIDE, _SIDE, 3), crop)
    return image, label


def make_data(cifar10: Cifar10, batch: int, seed: int) -> Data:
    """The data sets: batches of images (b, 32, 32, 3), uint8, and one-hot labels (b, 10).

    The loss smooths the labels.
    """
    images, labels = cifar10.train
    train, validation = hold_out(labels)
    return Data(
        train=Pipeline(
            (images[train], labels[train]), batch=batch, seed=seed, transform=one_hot, augment=flip_and_crop
        ),
        validation=Pipeline(
            (images[validation], labels[validation]), batch=batch, shuffle=False, transform=one_hot
        ),
        test=Pipeline(tuple(cifar10.test), batch=batch, shuffle=False, transform=one_hot),
        examples=len(train),
    )


def small_cnn() -> keras.Model:
    """Two convolutions and a hidden layer, from images (b, 32, 32, 3) to logits (b, 10)."""
    return keras.Sequential(
        [
            keras.Input((_SIDE, _SIDE, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(_CLASSES, dtype="float32"),
        ],
        name="small",
    )


def resnet(width: int, *, synchronized: bool) -> keras.Model:
    """Eight convolutions and a dense layer: four in sequence, two of them followed by a residual pair.

    Args:
        width: the number of filters of the first convolution; the last has eight times as many.
        synchronized: whether BatchNorm computes its statistics over all replicas.

    Returns:
        A model from images (b, 32, 32, 3) to logits (b, 10).
    """

    def convolution(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=_MOMENTUM, synchronized=synchronized)(x)
        return layers.ReLU()(x)

    def residual(x: Any) -> Any:
        filters = x.shape[-1]
        return layers.Add()([x, convolution(convolution(x, filters), filters)])

    image = keras.Input((_SIDE, _SIDE, 3), name="image")
    x = convolution(layers.Rescaling(1 / 127.5, offset=-1.0)(image), width)
    x = residual(layers.MaxPooling2D()(convolution(x, 2 * width)))
    x = layers.MaxPooling2D()(convolution(x, 4 * width))
    x = residual(layers.MaxPooling2D()(convolution(x, 8 * width)))
    x = layers.Dense(_CLASSES, use_bias=False)(layers.GlobalMaxPooling2D()(x))
    # The factor keeps the initial logits small, as in Page's network.
    return keras.Model(image, layers.Rescaling(0.125, dtype="float32")(x), name="resnet")


def build_model(
    options: Cifar10Options, rate: Any, accumulation: int | None = None, *, replicas: int = 1
) -> keras.Model:
    """The compiled model that the options choose.

    Args:
        options: the recipe's options; `model` and `width` are used.
        rate: a learning rate or a schedule.
        accumulation: the number of micro-batches of one weight update; None means one.
        replicas: the number of replicas; with more than one, BatchNorm is synchronized.
    """
    if options.model == "small":
        model = small_cnn()
        optimizer = keras.optimizers.Adam(rate, gradient_accumulation_steps=accumulation)
    else:
        model = resnet(options.filters(), synchronized=replicas > 1)
        optimizer = keras.optimizers.AdamW(
            rate, weight_decay=_WEIGHT_DECAY, gradient_accumulation_steps=accumulation
        )
        optimizer.exclude_from_weight_decay(var_names=["gamma", "beta"])
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=_LABEL_SMOOTHING),
        metrics=["accuracy"],
    )
    return model


def train(options: Cifar10Options) -> str:
    """Train and test the model, and write the files of the run. Every process of the job must call this.

    Returns:
        A summary of the run, the same in every process. All files are complete when this returns.

    Raises:
        DataError: the archive is missing or incomplete.
        ConfigurationError: before training, if the batches do not fit the number of replicas or the run
            directory cannot be used for the run.
    """
    run = TrainingRun("cifar10", options)
    cifar10 = load_cifar10(options.data, limit=options.limit, download=options.download)
    data = make_data(cifar10, run.batches.micro_batch, options.seed)
    rate, replicas = run.schedule(len(data.train)), run.strategy.num_replicas_in_sync
    return run.train(data, lambda: build_model(options, rate, run.accumulation, replicas=replicas))


if __name__ == "__main__":
    show(train(Cifar10Options.parse()))
