"""The models of the recipes on texts: the mean of the words' vectors, and a small transformer.

They consist of Keras' own layers only, so that `keras.models.load_model` loads them without dtrain. Neither
has a random layer, so every synchronous strategy trains them to the same numbers. Nothing is trained here.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

_PADDING = 0


def embedding_model(vocabulary: int, classes: int, *, width: int = 16) -> keras.Model:
    """The mean of the words' vectors, one hidden layer, and one logit per class.

    Args:
        vocabulary: the number of different tokens, including 0 (padding).
        classes: the number of classes.
        width: the size of a word's vector and of the hidden layer.

    Returns:
        A model from tokens (b, any length) to float32 logits (b, classes).
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = _mean_of_words(layers.Embedding(vocabulary, width)(tokens), tokens)
    x = layers.Dense(width, activation="relu")(x)
    return keras.Model(tokens, layers.Dense(classes, dtype="float32")(x), name="embedding")


def transformer(
    vocabulary: int, classes: int, *, length: int, width: int = 64, blocks: int = 2, heads: int = 4
) -> keras.Model:
    """A transformer encoder with learned positions, the mean of its outputs, and one logit per class.

    Each block has an attention layer and a hidden layer, both with a residual connection and LayerNorm after
    it.

    Args:
        vocabulary: the number of different tokens, including 0 (padding).
        classes: the number of classes.
        length: the number of positions; no text may be longer.
        width: the size of a word's vector; a multiple of `heads`.
        blocks: the number of blocks.
        heads: the number of attention heads of each block.

    Returns:
        A model from tokens (b, up to `length`) to float32 logits (b, classes).
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    # Computed from the input, so that the positions are part of the model and fit a batch of any length.
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
    """The mean of `x` (b, length, width) over the positions that are no padding; zero without words."""
    weights = ops.expand_dims(ops.cast(ops.not_equal(tokens, _PADDING), "float32"), axis=-1)
    total = ops.sum(ops.cast(x, "float32") * weights, axis=1)
    return total / ops.maximum(ops.sum(weights, axis=1), 1.0)
