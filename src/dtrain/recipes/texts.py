"""What the recipes on texts share: encode texts as tokens, train, and save a model that takes texts.
Keras' TextVectorization learns the vocabulary from the training texts; no vocabulary is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import dtrain
from dtrain.base import safe_files
from dtrain.data import Pipeline, Texts
from dtrain.monitor import RunDirectory
from dtrain.recipes.catalogue import TextOptions
from dtrain.recipes.running import Data, TrainingRun
from dtrain.recipes.text_models import embedding_model, transformer

_AT_A_TIME = 1024
_FILE = "vocabulary.txt"


def make_vectorizer(texts: Sequence[str], vocabulary: int, length: int) -> keras.layers.TextVectorization:
    """Learn the most frequent words of the texts; token 0 is padding, and token 1 is any other word.

    The same texts give the same tokens in every process.

    Args:
        texts: the training texts.
        vocabulary: the largest number of tokens, including tokens 0 and 1.
        length: the number of words after which a text is cut.

    Returns:
        A layer from texts (b,) to tokens (b, length).
    """
    words = keras.layers.TextVectorization(max_tokens=vocabulary, output_sequence_length=length)
    words.adapt(tf.data.Dataset.from_tensor_slices(list(texts)).batch(_AT_A_TIME))
    return words


def encode(words: keras.layers.TextVectorization, texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """The tokens of each text, without padding; a text without words is a single padding token.

    Returns:
        For each text an array (number of words,).
    """
    rows: list[NDArray[np.int32]] = []
    for start in range(0, len(texts), _AT_A_TIME):
        padded = words(tf.constant(list(texts[start : start + _AT_A_TIME]))).numpy().astype(np.int32)
        lengths = np.maximum((padded != 0).sum(axis=1), 1)
        rows += [row[:length] for row, length in zip(padded, lengths, strict=True)]
    return rows


def make_data(
    train: Texts,
    validation: Texts,
    test: Texts,
    words: keras.layers.TextVectorization,
    run_batch: int,
    seed: int,
) -> Data:
    """The data sets: batches of tokens (b, longest text of the batch), padded with 0, and labels (b,)."""

    def pipeline(part: Texts, *, shuffle: bool) -> Pipeline:
        return Pipeline(
            (encode(words, part.texts), part.labels), batch=run_batch, shuffle=shuffle, seed=seed, pad=True
        )

    return Data(
        train=pipeline(train, shuffle=True),
        validation=pipeline(validation, shuffle=False),
        test=pipeline(test, shuffle=False),
        examples=len(train.labels),
    )


def build_model(
    options: TextOptions, vocabulary: int, classes: int, rate: Any, accumulation: int | None = None
) -> keras.Model:
    """The compiled model that the options choose.

    Args:
        options: the recipe's options; `model` and `sequence_length` are used.
        vocabulary: the number of different tokens.
        classes: the number of classes.
        rate: a learning rate or a schedule.
        accumulation: the number of micro-batches of one weight update; None means one.
    """
    if options.model == "embedding":
        model = embedding_model(vocabulary, classes)
    else:
        model = transformer(vocabulary, classes, length=options.sequence_length)
    model.compile(
        optimizer=keras.optimizers.Adam(rate, gradient_accumulation_steps=accumulation),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def save_reader(model: keras.Model, words: keras.layers.TextVectorization, run: RunDirectory) -> None:
    """Write `model.keras`, a model that takes texts (b,), and `vocabulary.txt` to the run's directory.

    The saved model consists of `words` and the trained model, on one device and without the optimizer's
    state. It is compiled, so it can be evaluated on texts and labels without further steps.
    """
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    texts = keras.Input((), dtype="string", name="texts")
    reader = keras.Model(texts, plain(words(texts)), name=model.name)
    reader.compile(optimizer="sgd", loss=model.loss, metrics=["accuracy"])
    reader.save(run.model)
    safe_files.write_text(run.path / _FILE, "\n".join(words.get_vocabulary()) + "\n")


def train_on(
    run: TrainingRun,
    options: TextOptions,
    train: Texts,
    validation: Texts,
    test: Texts,
    *,
    classes: int,
    also: Callable[[RunDirectory], None] = lambda run: None,
) -> str:
    """Learn the vocabulary of the training texts, then train and test the model that the options choose.

    Args:
        run: the recipe's run.
        options: the recipe's options.
        train, validation, test: the texts and labels of each part.
        classes: the number of classes.
        also: writes further files next to the trained model; called only on the chief.

    Returns:
        A summary of the run; see `TrainingRun.train`.
    """
    words = make_vectorizer(train.texts, options.vocabulary, options.sequence_length)
    data = make_data(train, validation, test, words, run.batches.micro_batch, options.seed)
    rate = run.schedule(len(data.train))

    def save(model: keras.Model, directory: RunDirectory) -> None:
        if dtrain.is_chief():
            save_reader(model, words, directory)
            also(directory)

    return run.train(
        data,
        lambda: build_model(options, words.vocabulary_size(), classes, rate, run.accumulation),
        save=save,
    )
