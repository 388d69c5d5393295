"""The models of the recipes on texts: the mean of the words' vectors, and a small transformer.

They are made of Keras' own layers only, so that `keras.models.load_model` loads them where dtrain is not
installed. Neither has a random layer: every strategy trains them to the same numbers.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

_PADDING = 0


def embedding_model(vocabulary: int, classes: int, *, width: int = 16) -> keras.Model:
    """The mean of the words' vectors, one hidden layer, and a number for each class.

    Args:
        vocabulary: how many different tokens there are, 0 (padding) among them.
        classes: how many to tell apart.
        width: of a word's vector and of the hidden layer.

    Returns:
        A model from tokens (b, any) to float32 logits (b, classes).
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = _mean_of_words(layers.Embedding(vocabulary, width)(tokens), tokens)
    x = layers.Dense(width, activation="relu")(x)
    return keras.Model(tokens, layers.Dense(classes, dtype="float32")(x), name="embedding")


def transformer(
    vocabulary: int, classes: int, *, length: int, width: int = 64, blocks: int = 2, heads: int = 4
) -> keras.Model:
    """Blocks of attention and a hidden layer, each added to its input and normalised; then as above.

    Args:
        vocabulary: how many different tokens there are, 0 (padding) among them.
        classes: how many to tell apart.
        length: of the longest text; places are learned.
        width: of a word's vector; a multiple of `heads`.
        blocks: how many.
        heads: of the attention in each.

    Returns:
        A model from tokens (b, up to `length`) to float32 logits (b, classes).
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    # Computed from the input, so that the places belong to the model, and for a batch of any length.
    places = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(vocabulary, width)(tokens) + layers.Embedding(length, width)(places)
    seen = ops.expand_dims(ops.not_equal(tokens, _PADDING), axis=1)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(heads, key_dim=width // heads)(x, x, attention_mask=seen)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(2 * width, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    x = _mean_of_words(x, tokens)
    return keras.Model(tokens, layers.Dense(classes, dtype="float32")(x), name="transformer")


def _mean_of_words(x: Any, tokens: Any) -> Any:
    """The mean over the places that are no padding; zero for a text without words."""
    weights = ops.expand_dims(ops.cast(ops.not_equal(tokens, _PADDING), "float32"), axis=-1)
    total = ops.sum(ops.cast(x, "float32") * weights, axis=1)
    return total / ops.maximum(ops.sum(weights, axis=1), 1.0)
