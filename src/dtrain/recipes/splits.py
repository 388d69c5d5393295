"""Which examples of a training part are kept for validation, where the published data has no such part.

It chooses by place alone, so that every process and every run keeps the same ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import DataError

_EVERY = 10


def hold_out(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every tenth example of each class for validation, the rest to train on; at least one of each.

    Args:
        labels: (n,), of all examples in their order.

    Returns:
        The places of those to train on, and of those for validation; both ascending.

    Raises:
        DataError: there are fewer than 2.
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
