"""Handwritten digits: the 1797 real images that come with the package, split for training.

It downloads nothing, and equal arguments give equal arrays: it is a data set, not an input pipeline.
"""

from __future__ import annotations

import io
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.base.words import whole_number
from dtrain.errors import ConfigurationError, DataError

_LARGEST_PIXEL = 16.0  # a value counts the dark pixels in a block of 4 x 4
_LARGEST_SEED = 2**32 - 1  # of `numpy.random.RandomState`


class Examples(NamedTuple):
    """Images and their labels, in the same order.

    Attributes:
        images: of shape (n, height, width, channels). The digits are float32 of shape (n, 8, 8, 1), from 0
            (paper) to 1 (ink); other data sets state their own.
        labels: int64 of shape (n,), from 0; the digits' labels go to 9.

    Example:
        ```python
        images, labels = dtrain.data.load_digits().train
        ```
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


class Digits(NamedTuple):
    """The three parts of the data; no image is in two of them.

    Attributes:
        train: examples to train on.
        validation: examples to evaluate during training.
        test: examples to evaluate once, at the end.

    Example:
        ```python
        digits = dtrain.data.load_digits()
        print([len(part.images) for part in digits])  # [1257, 180, 360]
        ```
    """

    train: Examples
    validation: Examples
    test: Examples


def load_digits(*, validation: int = 180, test: int = 360, split_seed: int = 0) -> Digits:
    """Load the digits, split at random, with the same class proportions in all three parts.

    Args:
        validation: number of validation images.
        test: number of test images.
        split_seed: seed of the split. It is separate from the training seed, so that runs with different
            training seeds are evaluated on the same test images.

    Returns:
        Three `Examples`; with the default sizes 1257, 180 and 360 images.

    Raises:
        ConfigurationError: a size is no whole number, or `split_seed` is none from 0 to 2**32 - 1.
        DataError: a part would hold fewer than ten images, one of each digit.

    Example:
        ```python
        digits = dtrain.data.load_digits(test=100)
        print(digits.test.images.shape)  # (100, 8, 8, 1)
        ```
    """
    validation, test = whole_number(validation, "validation"), whole_number(test, "test")
    split_seed = whole_number(split_seed, "split_seed", 0)
    if split_seed > _LARGEST_SEED:
        raise ConfigurationError(f"split_seed={split_seed} was set.", hint=f"it is at most {_LARGEST_SEED}")
    source = np.load(io.BytesIO((resources.files(__package__) / "digits.npz").read_bytes()))
    images = (source["images"] / _LARGEST_PIXEL).astype(np.float32)[..., np.newaxis]
    labels = source["labels"].astype(np.int64)
    smallest = min(validation, test, len(labels) - validation - test)
    if smallest < 10:
        raise DataError(
            f"Of {len(labels)} digits, validation={validation} and test={test} leave a part of {smallest}.",
            hint="Every part needs at least 10 images, one of each digit.",
        )

    whole = Examples(images, labels)
    rest, kept = _split(whole, test, split_seed)
    trained, looked_at = _split(rest, validation, split_seed)
    return Digits(train=trained, validation=looked_at, test=kept)


def _split(source: Examples, held: int, seed: int) -> tuple[Examples, Examples]:
    """Split off `held` examples; returns (the remaining examples, the held ones).

    The split equals scikit-learn's `train_test_split(stratify=labels)`: it draws the same random numbers in
    the same order, so that results are comparable with those of others who use scikit-learn's split.
    """
    draw = np.random.RandomState(seed)
    counts = np.bincount(source.labels)
    in_rest = _shares(counts, len(source.labels) - held, draw)
    in_held = _shares(counts - in_rest, held, draw)
    parts: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])
    for label, (rest, taken) in enumerate(zip(in_rest, in_held, strict=True)):
        places = draw.permutation(np.flatnonzero(source.labels == label))
        parts[0].append(places[:rest])
        parts[1].append(places[rest : rest + taken])
    rest, taken = (draw.permutation(np.concatenate(places)) for places in parts)
    return Examples(source.images[rest], source.labels[rest]), Examples(
        source.images[taken], source.labels[taken]
    )


def _shares(counts: NDArray[np.int64], size: int, draw: np.random.RandomState) -> NDArray[np.int64]:
    """How many examples of each label to draw: in proportion to `counts`, rounded to sum to `size`."""
    exact = counts / counts.sum() * size
    shares = np.floor(exact)
    rests = exact - shares
    for rest in np.unique(rests)[::-1]:
        missing = int(size - shares.sum())
        if missing <= 0:
            break
        equal = np.flatnonzero(rests == rest)
        shares[draw.choice(equal, size=min(len(equal), missing), replace=False)] += 1
    return shares.astype(np.int64)
