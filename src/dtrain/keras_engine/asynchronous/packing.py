"""Many tensors as a few flat ones, so that a message costs one round trip and not one a variable."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_WORDS = (tf.float32, tf.int32, tf.uint32, tf.float64, tf.int64, tf.uint64)


class Packing:
    """How tensors of known shapes lie in flat ones: numbers of 4 and 8 bytes together, the others by dtype.

    The first travel as 4-byte words: as float32 where there is any, since that is what most are, so that most
    need no conversion; the others' bits are only copied, never computed with.

    Args:
        specs: dtype and shape of every tensor, fully defined.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(specs)
        self._word = tf.float32 if any(spec.dtype is tf.float32 for spec in self._specs) else tf.int32
        self._groups: dict[tf.DType, list[int]] = {}
        for i, spec in enumerate(self._specs):
            self._groups.setdefault(self._word if spec.dtype in _WORDS else spec.dtype, []).append(i)

    @property
    def flat_specs(self) -> list[tf.TensorSpec]:
        """What `pack` gives."""
        return [tf.TensorSpec([sum(self._sizes(members))], dtype) for dtype, members in self._groups.items()]

    def pack(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """One flat tensor a group; `tensors` in the order of the specs."""
        return [
            tf.concat([self._flat(tensors[i], self._specs[i]) for i in members], axis=0)
            for members in self._groups.values()
        ]

    def unpack(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What `pack` was given."""
        out: list[Any] = [None] * len(self._specs)
        for flat, members in zip(flats, self._groups.values(), strict=True):
            for i, part in zip(members, tf.split(flat, self._sizes(members)), strict=True):
                out[i] = self._restored(part, self._specs[i])
        return out

    def unpack_arrays(self, flats: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `unpack`, for arrays."""
        out: list[Any] = [None] * len(self._specs)
        for flat, members in zip(flats, self._groups.values(), strict=True):
            ends = itertools.accumulate(self._sizes(members))
            for i, end, size in zip(members, ends, self._sizes(members), strict=True):
                spec = self._specs[i]
                part = flat[end - size : end]
                if spec.dtype in _WORDS:
                    part = np.ascontiguousarray(part).view(spec.dtype.as_numpy_dtype)
                out[i] = part.reshape(spec.shape.as_list())
        return out

    def _flat(self, tensor: Any, spec: tf.TensorSpec) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor, spec.dtype)
        if spec.dtype in _WORDS and spec.dtype is not self._word:
            tensor = tf.bitcast(tensor, self._word)
        return tf.reshape(tensor, [-1])

    def _restored(self, part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        if spec.dtype in _WORDS and spec.dtype is not self._word:
            if spec.dtype.size == 8:
                part = tf.reshape(part, [-1, 2])
            part = tf.bitcast(part, spec.dtype)
        return tf.reshape(part, spec.shape)

    def _sizes(self, members: Sequence[int]) -> list[int]:
        return [_words(self._specs[i]) for i in members]

    def __iter__(self) -> Iterator[tf.TensorSpec]:
        return iter(self._specs)


def _words(spec: tf.TensorSpec) -> int:
    each = spec.dtype.size // 4 if spec.dtype in _WORDS else 1
    return int(spec.shape.num_elements()) * each
