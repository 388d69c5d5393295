"""Many small tensors as a few flat ones, so that a message costs one round trip and not one a variable.

Large ones go by themselves: to put them together and take them apart again costs more than their messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_WORDS = (tf.float32, tf.int32, tf.uint32, tf.float64, tf.int64, tf.uint64)

LARGE = 256 << 10
"""Bytes from which on a tensor goes by itself. Each copy of as many takes about as long as a message."""


class _Group(NamedTuple):
    """Tensors that travel as one: their numbers, and the dtype of the flat one."""

    dtype: Any
    members: list[int]


class Packing:
    """How tensors of known shapes lie in flat ones: numbers of 4 and 8 bytes together, the others by dtype.

    The first travel as 4-byte words: as float32 where there is any, since that is what most are, so that most
    need no conversion; the others' bits are only copied, never computed with. Large ones are not copied.

    Args:
        specs: dtype and shape of every tensor, fully defined.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(specs)
        self._word = tf.float32 if any(spec.dtype is tf.float32 for spec in self._specs) else tf.int32
        self._groups: list[_Group] = []
        self._large: set[int] = set()
        together: dict[tf.DType, _Group] = {}
        for i, spec in enumerate(self._specs):
            if _bytes(spec) >= LARGE:
                self._large.add(i)
                self._groups.append(_Group(spec.dtype, [i]))
                continue
            dtype = self._word if spec.dtype in _WORDS else spec.dtype
            if dtype not in together:
                together[dtype] = _Group(dtype, [])
                self._groups.append(together[dtype])
            together[dtype].members.append(i)

    @property
    def flat_specs(self) -> list[tf.TensorSpec]:
        """What `pack` gives."""
        return [tf.TensorSpec([sum(self._sizes(group.members))], group.dtype) for group in self._groups]

    def pack(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """One flat tensor a group; `tensors` in the order of the specs."""
        flats = []
        for group in self._groups:
            parts = [self._flat(tensors[i], i) for i in group.members]
            flats.append(parts[0] if len(parts) == 1 else tf.concat(parts, axis=0))
        return flats

    def unpack(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What `pack` was given."""
        out: list[Any] = [None] * len(self._specs)
        for flat, group in zip(flats, self._groups, strict=True):
            whole = len(group.members) == 1
            parts = [flat] if whole else tf.split(flat, self._sizes(group.members))
            for i, part in zip(group.members, parts, strict=True):
                out[i] = self._restored(part, i)
        return out

    def unpack_arrays(self, flats: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `unpack`, for arrays."""
        out: list[Any] = [None] * len(self._specs)
        for flat, group in zip(flats, self._groups, strict=True):
            ends = itertools.accumulate(self._sizes(group.members))
            for i, end, size in zip(group.members, ends, self._sizes(group.members), strict=True):
                spec = self._specs[i]
                part = flat[end - size : end]
                if self._in_words(i):
                    part = np.ascontiguousarray(part).view(spec.dtype.as_numpy_dtype)
                out[i] = part.reshape(spec.shape.as_list())
        return out

    def _in_words(self, i: int) -> bool:
        """Whether a tensor travels as words."""
        return i not in self._large and self._specs[i].dtype in _WORDS

    def _flat(self, tensor: Any, i: int) -> tf.Tensor:
        spec = self._specs[i]
        tensor = tf.convert_to_tensor(tensor, spec.dtype)
        if self._in_words(i) and spec.dtype is not self._word:
            tensor = tf.bitcast(tensor, self._word)
        return tf.reshape(tensor, [-1])

    def _restored(self, part: tf.Tensor, i: int) -> tf.Tensor:
        spec = self._specs[i]
        if self._in_words(i) and spec.dtype is not self._word:
            if spec.dtype.size == 8:
                part = tf.reshape(part, [-1, 2])
            part = tf.bitcast(part, spec.dtype)
        return tf.reshape(part, spec.shape)

    def _sizes(self, members: Sequence[int]) -> list[int]:
        return [self._size(i) for i in members]

    def _size(self, i: int) -> int:
        """Of a tensor in the flat one, in elements of that."""
        spec = self._specs[i]
        each = spec.dtype.size // 4 if self._in_words(i) else 1
        return int(spec.shape.num_elements()) * each

    def __iter__(self) -> Iterator[tf.TensorSpec]:
        return iter(self._specs)


def _bytes(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements()) * max(spec.dtype.size or 0, 1)
