"""Classify sentences with a small transformer: words become numbers in the pipeline, places are learned.

Run `python examples/text_classification.py [STRATEGY]`, or under
`dtrain launch --workers 2 examples/text_classification.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain

LENGTH = 12
WORDS = ["plot", "actor", "scene", "music", "the", "a", "was", "with"]
PRAISE = ["moving", "brilliant", "fresh"]
BLAME = ["dull", "clumsy", "endless"]


@keras.saving.register_keras_serializable(package="dtrain_examples")
class TokenAndPosition(keras.layers.Layer):
    """The sum of what a token means and what its place means."""

    def __init__(self, vocabulary: int, length: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens = keras.layers.Embedding(vocabulary, width)
        self.positions = keras.layers.Embedding(length, width)

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions(keras.ops.arange(tokens.shape[-1]))


def make_sentences(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Sentences of common words with one word of praise or blame, and which it is."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    sentences = []
    for label in labels:
        words = list(random.choice(WORDS, random.integers(4, LENGTH)))
        words[random.integers(len(words))] = str(random.choice(PRAISE if label else BLAME))
        sentences.append(" ".join(words))
    return sentences, labels


def make_model(vocabulary: int, width: int = 16, heads: int = 2) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int64")
    x = TokenAndPosition(vocabulary, LENGTH, width)(tokens)
    attended = keras.layers.MultiHeadAttention(heads, key_dim=width // heads)(x, x)
    x = keras.layers.LayerNormalization()(x + attended)
    mixed = keras.layers.Dense(width)(keras.layers.Dense(2 * width, activation="relu")(x))
    x = keras.layers.LayerNormalization()(x + mixed)
    return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x)))


def main(strategy_name: str = "auto", epochs: int = 4) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    keras.utils.set_random_seed(9)
    to_numbers = keras.layers.TextVectorization(
        output_sequence_length=LENGTH, vocabulary=[*WORDS, *PRAISE, *BLAME]
    )

    def pipeline(count: int, seed: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(make_sentences(count, seed)).batch(32)
        return data.map(lambda text, label: (to_numbers(text), label), num_parallel_calls=tf.data.AUTOTUNE)

    with strategy.scope():
        model = make_model(to_numbers.vocabulary_size())
        model.compile(
            optimizer=keras.optimizers.Adam(0.005),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
        )
    history = model.fit(
        pipeline(320, seed=9), validation_data=pipeline(96, seed=10), epochs=epochs, verbose=0
    )
    if dtrain.is_chief():
        print(f"validation accuracy {history.history['val_accuracy'][-1]:.3f}")
    return {"losses": history.history["loss"], "val_accuracy": history.history["val_accuracy"]}


if __name__ == "__main__":
    main(*sys.argv[1:2])
