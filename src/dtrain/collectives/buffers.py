"""Reuses the memory of results from step to step, so that no step has to map new pages.

Memory is reused only when neither Python nor TensorFlow refers to the array in it. TensorFlow uses aligned
arrays without a copy, and keeps a reference as long as a tensor uses one.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: TensorFlow requires it to use an array without a copy


_SIZES = 1000  # how many different sizes of arrays are kept


class Buffers:
    """A pool of aligned arrays. It is not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[int, list[_Block]] = {}
        # The reference count of unused memory, measured as in `take`: the block's reference, and the call's.
        idle = _Block(1)
        self._idle = sys.getrefcount(idle.memory)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an array with arbitrary content; its memory is reused when no reference to it is left.

        For each size, the pool keeps as many arrays as were ever in use at the same time. The number of sizes
        is limited, so that values whose size changes from step to step do not fill the memory.

        Args:
            shape: the shape of the array.
            dtype: a NumPy dtype, or one of `ml_dtypes`.
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
    """Returns an aligned array outside of the pool, for results whose size varies from step to step."""
    return _Block(math.prod(shape) * np.dtype(dtype).itemsize).array(shape, dtype)


class _Block:
    """Memory for one aligned array of `size` bytes.

    Attributes:
        memory: the bytes; each array that uses them holds a reference to this object.
    """

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size + ALIGNMENT, np.uint8)
        self._start = -self.memory.ctypes.data % ALIGNMENT

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.ndarray(shape, dtype, self.memory, self._start)
