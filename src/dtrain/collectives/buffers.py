"""Memory for results that is kept from step to step, so that no step pays for fresh pages.

An array is given out again only when nobody holds what was given before: neither Python nor TensorFlow,
which takes aligned arrays as they are and keeps a reference for as long as a tensor lives in them.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: what TensorFlow asks of memory that it takes without a copy


_SIZES = 1000  # of arrays that are kept


class Buffers:
    """Aligned arrays, kept for their next use. Not for several threads at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, list[_Block]] = {}
        # As it is asked in `take`: a reference of the block, and the call's.
        idle = _Block(1)
        self._idle = sys.getrefcount(idle.memory)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array with arbitrary content, which is the caller's until nobody refers to it any more.

        As many of a size are kept as were ever in use at once; of sizes only so many as a model may have, so
        that values whose length differs from step to step do not fill the memory.

        Args:
            shape: of the array.
            dtype: a NumPy dtype, also one of `ml_dtypes`.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        kept = self._kept.get(size)
        if kept is None:
            if len(self._kept) >= _SIZES:
                return fresh(shape, dtype)
            kept = self._kept[size] = []
        for block in kept:
            if sys.getrefcount(block.memory) == self._idle:
                return block.array(shape, dtype)
        kept.append(_Block(size))
        return kept[-1].array(shape, dtype)


def fresh(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An aligned array that is not kept, for results whose size varies from step to step."""
    return _Block(math.prod(shape) * np.dtype(dtype).itemsize).array(shape, dtype)


class _Block:
    """Memory that holds an aligned array of so many bytes.

    Attributes:
        memory: its bytes; each array in it holds a reference to them.
    """

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size + ALIGNMENT, np.uint8)
        self._start = -self.memory.ctypes.data % ALIGNMENT

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.ndarray(shape, dtype, self.memory, self._start)
