"""From texts to batches of numbers and back to a model that takes texts: what the recipes on texts share.

The words are learned from the training texts, by Keras' TextVectorization; no downloaded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import dtrain
from dtrain.data import Pipeline, Texts
from dtrain.monitor import RunDirectory
from dtrain.recipes.catalogue import TextOptions
from dtrain.recipes.running import Data, TrainingRun
from dtrain.recipes.text_models import embedding_model, transformer

_AT_A_TIME = 1024
_FILE = "vocabulary.txt"


def learn_words(texts: Sequence[str], vocabulary: int, length: int) -> keras.layers.TextVectorization:
    """The most frequent words of the texts, each with its number; 0 is padding and 1 any other word.

    The same texts give the same numbers in every process.

    Args:
        texts: what to learn from.
        vocabulary: how many numbers there are at most.
        length: words after which a text is cut.
    """
    words = keras.layers.TextVectorization(max_tokens=vocabulary, output_sequence_length=length)
    words.adapt(tf.data.Dataset.from_tensor_slices(list(texts)).batch(_AT_A_TIME))
    return words


def encode(words: keras.layers.TextVectorization, texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """The numbers of each text's words, without padding; a text without words is one padding."""
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
    """Batches of tokens (b, longest of the batch), padded with 0, and integer labels (b,)."""

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
    """The compiled model that the options ask for.

    Args:
        options: which, and for texts of what length.
        vocabulary: how many different tokens there are.
        classes: how many to tell apart.
        rate: a learning rate, or a schedule of it.
        accumulation: micro-batches behind one update; None for one.
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
    """Write `model.keras` as a model that takes texts (b,), and beside it `vocabulary.txt`.

    The model in the file is the trained one behind `words`, on one device and without the optimizer's state;
    it can be evaluated on texts and labels at once.
    """
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    texts = keras.Input((), dtype="string", name="texts")
    reader = keras.Model(texts, plain(words(texts)), name=model.name)
    reader.compile(optimizer="sgd", loss=model.loss, metrics=["accuracy"])
    reader.save(run.model)
    (run.path / _FILE).write_text("\n".join(words.get_vocabulary()) + "\n", encoding="utf-8")


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
    """Learn the words of the training texts, then train and test the model that the options ask for.

    Args:
        run: of the recipe.
        options: what it was told.
        train, validation, test: texts and labels of each part.
        classes: how many to tell apart.
        also: writes more beside the trained model; only the chief calls it.

    Returns:
        A summary of the run, as `TrainingRun.train` gives it.
    """
    words = learn_words(train.texts, options.vocabulary, options.sequence_length)
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
