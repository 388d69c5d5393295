"""Handwritten digits: the 1797 real images that scikit-learn brings with it, split for training.

Nothing is downloaded, and nothing here is random from one call to the next: it is a source, not a pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import DataError, UnsupportedVersionError

_LARGEST_PIXEL = 16.0  # the source counts the dark pixels in blocks of 4 x 4


class Examples(NamedTuple):
    """Images and their labels, in the same order.

    Attributes:
        images: float32 of shape (n, 8, 8, 1), from 0 (paper) to 1 (ink).
        labels: int64 of shape (n,), from 0 to 9.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


class Digits(NamedTuple):
    """The three parts of the data; no image is in two of them.

    Attributes:
        train: what the weights are fitted to.
        validation: what is looked at while training.
        test: what is looked at once, at the end.
    """

    train: Examples
    validation: Examples
    test: Examples


def load_digits(*, validation: int = 180, test: int = 360, split_seed: int = 0) -> Digits:
    """Load the digits, split at random but with every digit's share the same in all three parts.

    Args:
        validation: how many images are taken from the training part for validation.
        test: how many images are kept for the test.
        split_seed: seed of the split. It is apart from the seed of the training, so that runs with
            different seeds are measured on the same test images.

    Returns:
        Three `Examples`; with the default sizes 1257, 180 and 360 images.

    Raises:
        UnsupportedVersionError: scikit-learn is not installed.
        DataError: a part would hold fewer than the ten digits.
    """
    try:
        from sklearn.datasets import load_digits as bundled_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise UnsupportedVersionError(
            f"The digits come with scikit-learn, which cannot be imported: {error}.",
            hint="Install it: pip install scikit-learn",
        ) from error

    source = bundled_digits()
    images = (source.images / _LARGEST_PIXEL).astype(np.float32)[..., np.newaxis]
    labels = source.target.astype(np.int64)
    smallest = min(validation, test, len(labels) - validation - test)
    if smallest < 10:
        raise DataError(
            f"Of {len(labels)} digits, validation={validation} and test={test} leave a part of {smallest}.",
            hint="Every part needs at least 10 images, one of each digit.",
        )

    rest_images, test_images, rest_labels, test_labels = train_test_split(
        images, labels, test_size=test, stratify=labels, random_state=split_seed
    )
    train_images, validation_images, train_labels, validation_labels = train_test_split(
        rest_images, rest_labels, test_size=validation, stratify=rest_labels, random_state=split_seed
    )
    return Digits(
        train=Examples(train_images, train_labels),
        validation=Examples(validation_images, validation_labels),
        test=Examples(test_images, test_labels),
    )
