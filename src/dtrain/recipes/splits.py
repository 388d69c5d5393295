"""Splits a validation part off the training part of a published data set that has none.

It selects examples by their index only, so every process and every run selects the same ones. It does not
shuffle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import DataError

_EVERY = 10


def hold_out(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hold out every tenth example of each class for validation; if no class has ten, the last example.

    Args:
        labels: the labels (n,) of all examples.

    Returns:
        The indices of the training examples and those of the validation examples, both ascending and not
        empty.

    Raises:
        DataError: there are fewer than 2 examples.
    """
    if len(labels) < 2:
        raise DataError(
            f"There is {len(labels)} example to train on, and one is needed for validation.",
            hint="Give 2 examples or more; 10 of each class begin to make sense.",
        )
    kept = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        kept[np.flatnonzero(labels == label)[_EVERY - 1 :: _EVERY]] = True
    if not kept.any():
        kept[-1] = True
    return np.flatnonzero(~kept), np.flatnonzero(kept)
