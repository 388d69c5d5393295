"""Generated data that a model can learn: for trying a program, for tests, and for measuring speed.

The data is not real, and a result on it does not say how well a model would do on real data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.base.words import whole_number
from dtrain.data.digits import Examples
from dtrain.errors import ConfigurationError

_RULE_SEED = 20  # seed of the task; the caller's seed draws examples of the task
_NOISE = 0.25
_TELLING = 0.3  # the share of tokens that are specific to the class of their row


class Tokens(NamedTuple):
    """Rows of tokens and their labels, in the same order.

    Attributes:
        tokens: int32 of shape (n, length), from 1; 0 is reserved for padding.
        labels: int64 of shape (n,), from 0.

    Example:
        ```python
        tokens, labels = dtrain.data.synthetic_texts(100)
        ```
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int64]


class Values(NamedTuple):
    """Inputs and their targets, in the same order.

    Attributes:
        inputs: float32 of shape (n, ...), normally distributed.
        targets: float32 of shape (n, 1).

    Example:
        ```python
        inputs, targets = dtrain.data.synthetic_values(100)
        ```
    """

    inputs: NDArray[np.float32]
    targets: NDArray[np.float32]


def synthetic_images(
    examples: int, *, shape: tuple[int, ...] = (32, 32, 3), classes: int = 10, seed: int = 0
) -> Examples:
    """Images of classes; each class has its own pattern, to which noise is added.

    The patterns depend on `shape` and `classes` only, so another seed gives more examples of the same task,
    such as for validation.

    Args:
        examples: number of images.
        shape: shape of one image.
        classes: number of classes; their sizes differ by at most one.
        seed: seed of the examples.

    Returns:
        float32 images of shape (examples, *shape) from 0 to 1, and int64 labels of shape (examples,).

    Raises:
        ConfigurationError: a number is not positive, the seed is negative, or the shape is no tuple.

    Example:
        ```python
        images, labels = dtrain.data.synthetic_images(100, shape=(8, 8, 1), classes=3)
        ```
    """
    _check(seed, examples=examples, classes=classes, **_sizes(shape))
    patterns = np.random.default_rng([_RULE_SEED, classes, *shape]).random((classes, *shape), np.float32)
    random = np.random.default_rng(seed)
    labels = _balanced_labels(random, examples, classes)
    images = random.standard_normal((examples, *shape), np.float32)
    images *= _NOISE
    images += patterns[labels]
    return Examples(np.clip(images, 0, 1, out=images), labels)


def synthetic_texts(
    examples: int, *, length: int = 128, vocabulary: int = 10_000, classes: int = 2, seed: int = 0
) -> Tokens:
    """Rows of tokens; some tokens occur in one class only.

    The tokens of a class depend on `vocabulary` and `classes` only, so another seed gives more examples of
    the same task.

    Args:
        examples: number of rows.
        length: number of tokens in a row.
        vocabulary: tokens are from 1 to `vocabulary - 1`.
        classes: number of classes; their sizes differ by at most one.
        seed: seed of the examples.

    Returns:
        int32 tokens of shape (examples, length) and int64 labels of shape (examples,).

    Raises:
        ConfigurationError: a number is not positive, the seed is negative, or the vocabulary is too small for
            the classes.

    Example:
        ```python
        tokens, labels = dtrain.data.synthetic_texts(100, length=16, vocabulary=50)
        print(tokens.shape)  # (100, 16)
        ```
    """
    _check(seed, examples=examples, length=length, vocabulary=vocabulary, classes=classes)
    # A tenth of the tokens belong to one class each; all classes use the others.
    own = max(1, (vocabulary - 1) // (10 * classes))
    if vocabulary - 1 <= own * classes:
        raise ConfigurationError(
            f"vocabulary={vocabulary} is too small for classes={classes}.",
            hint=f"Take at least {classes + 2}: each class has a word of its own, and one is for all.",
        )
    random = np.random.default_rng(seed)
    labels = _balanced_labels(random, examples, classes)
    tokens = random.integers(1 + own * classes, vocabulary, (examples, length), np.int32)
    telling = random.random((examples, length), np.float32) < _TELLING
    words = 1 + labels[:, None] * own + random.integers(0, own, (examples, length), np.int32)
    return Tokens(np.where(telling, words, tokens).astype(np.int32), labels)


def synthetic_values(examples: int, shape: tuple[int, ...] = (10,), seed: int = 0) -> Values:
    """Inputs whose target is a weighted sum of them and a little noise.

    The weights depend on `shape` only, so another seed gives more examples of the same task.

    Args:
        examples: number of inputs.
        shape: shape of one input.
        seed: seed of the examples.

    Returns:
        float32 inputs of shape (examples, *shape) and targets (examples, 1), both of variance about 1.

    Raises:
        ConfigurationError: a number is not positive, the seed is negative, or the shape is no tuple.

    Example:
        ```python
        inputs, targets = dtrain.data.synthetic_values(100, shape=(4,))
        validation = dtrain.data.synthetic_values(50, shape=(4,), seed=1)
        ```
    """
    _check(seed, examples=examples, **_sizes(shape))
    rule = np.random.default_rng([_RULE_SEED, *shape])
    weights = rule.standard_normal((math.prod(shape), 1), np.float32)
    weights /= np.linalg.norm(weights)
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((examples, *shape), np.float32)
    noise = random.standard_normal((examples, 1), np.float32) * np.float32(0.1)
    return Values(inputs, inputs.reshape(examples, -1) @ weights + noise)


def _balanced_labels(random: np.random.Generator, examples: int, classes: int) -> NDArray[np.int64]:
    return random.permutation(np.arange(examples, dtype=np.int64) % classes)


def _check(seed: int, **numbers: int) -> None:
    for name, number in numbers.items():
        whole_number(number, name, 1)
    whole_number(seed, "seed", 0)


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    """The sizes of a shape by their names in messages, such as `shape[0]`."""
    try:
        return {f"shape[{axis}]": size for axis, size in enumerate(shape)}
    except TypeError as error:
        raise ConfigurationError(
            f"shape={shape!r} is not a tuple.", hint="give the size of each axis, such as shape=(10,)"
        ) from error
