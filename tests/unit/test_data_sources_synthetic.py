"""Made-up data: shapes, types, the same from the same seed, and something in it that can be learned."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain.data import synthetic_images, synthetic_texts, synthetic_values
from dtrain.errors import ConfigurationError
from refusals import refused


def accuracy(train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> float:
    """Of the nearest mean of a class."""
    means = np.stack([train[labels == label].mean(0) for label in range(labels.max() + 1)])
    distances = ((test[:, None] - means[None]) ** 2).sum(-1)
    return float((distances.argmin(1) == test_labels).mean())


def test_images_have_their_form_and_another_seed_is_the_same_task():
    images, labels = synthetic_images(200, shape=(8, 6, 3), classes=4)
    assert (images.shape, images.dtype, labels.dtype) == ((200, 8, 6, 3), np.float32, np.int64)
    assert images.min() >= 0
    assert images.max() <= 1
    assert np.bincount(labels).tolist() == [50] * 4
    test = synthetic_images(100, shape=(8, 6, 3), classes=4, seed=1)
    assert accuracy(images.reshape(200, -1), labels, test.images.reshape(100, -1), test.labels) > 0.9
    assert not np.array_equal(images[:100], test.images)


def test_texts_have_their_form_and_another_seed_is_the_same_task():
    tokens, labels = synthetic_texts(200, length=64, vocabulary=300, classes=3)
    assert (tokens.shape, tokens.dtype, labels.dtype) == ((200, 64), np.int32, np.int64)
    assert tokens.min() >= 1
    assert tokens.max() == 299
    test = synthetic_texts(100, length=64, vocabulary=300, classes=3, seed=1)

    def counts(rows: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(row, minlength=300) for row in rows]).astype(float)

    assert accuracy(counts(tokens), labels, counts(test.tokens), test.labels) > 0.9
    assert not np.array_equal(tokens[:100], test.tokens)


def test_values_follow_a_rule_that_another_seed_shares():
    inputs, targets = synthetic_values(500, (4, 3))
    assert (inputs.shape, inputs.dtype) == ((500, 4, 3), np.float32)
    assert (targets.shape, targets.dtype) == ((500, 1), np.float32)
    weights, *_ = np.linalg.lstsq(inputs.reshape(500, -1), targets, rcond=None)
    test = synthetic_values(100, (4, 3), seed=1)
    error = test.targets - test.inputs.reshape(100, -1) @ weights
    assert error.std() < 0.15 < 0.7 < test.targets.std() < 1.4


@pytest.mark.parametrize("make", [synthetic_images, synthetic_texts, synthetic_values])
def test_the_same_seed_gives_the_same_numbers(make):
    for first, second in zip(make(7, seed=3), make(7, seed=3), strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(make(7, seed=3)[0], make(7, seed=4)[0])


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (synthetic_images, {"examples": 0}, "examples=0"),
        (synthetic_images, {"examples": 2, "shape": (8, 0)}, "shape[1]=0"),
        (synthetic_texts, {"examples": 2, "classes": -1}, "classes=-1"),
        (synthetic_texts, {"examples": 2, "vocabulary": 3}, "vocabulary=3"),
        (synthetic_values, {"examples": 2, "shape": (0,)}, "shape[0]=0"),
        (synthetic_values, {"examples": 2, "shape": 5}, "shape=5"),
        (synthetic_images, {"examples": 2, "shape": None}, "shape=None"),
        (synthetic_images, {"examples": 2, "seed": -1}, "seed=-1"),
        (synthetic_texts, {"examples": 2, "seed": 0.5}, "seed=0.5"),
        (synthetic_values, {"examples": 2, "seed": None}, "seed=None"),
    ],
)
def test_arguments_that_make_nothing(make, arguments, message):
    with refused(ConfigurationError, message):
        make(**arguments)
