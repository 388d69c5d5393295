"""Many small tensors as a few flat ones, so that a message costs one round trip and not one a variable.

Large ones go by themselves: to put them together and take them apart again costs more than their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_WORDS = (tf.float32, tf.int32, tf.uint32, tf.float64, tf.int64, tf.uint64)

LARGE = 256 << 10
"""Bytes from which on a tensor goes by itself. Each copy of as many takes about as long as a message."""


class Packing:
    """How tensors lie in flat ones: numbers of 4 and 8 bytes together, the others by dtype.

    The first travel as 4-byte words: as float32 where there is any, since that is what most are, so that most
    need no conversion; the others' bits are only copied, never computed with. Large tensors, and those whose
    shape is not known, go by themselves.

    Args:
        specs: dtype and shape of every tensor.

    Attributes:
        specs: the same.
        flat_specs: what `pack` gives.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self.specs = list(specs)
        self._word = tf.float32 if any(spec.dtype is tf.float32 for spec in self.specs) else tf.int32
        self._groups: list[list[int]] = []  # the numbers of the tensors that travel as one
        self.flat_specs: list[tf.TensorSpec] = []
        together: dict[tf.DType, list[int]] = {}
        for i, spec in enumerate(self.specs):
            if _goes_alone(spec):
                self._groups.append([i])
                continue
            dtype = self._word if spec.dtype in _WORDS else spec.dtype
            if dtype not in together:
                together[dtype] = []
                self._groups.append(together[dtype])
            together[dtype].append(i)
        for members in self._groups:
            first = self.specs[members[0]]
            if not _goes_alone(first):
                dtype = self._word if first.dtype in _WORDS else first.dtype
                first = tf.TensorSpec([sum(map(self._size, members))], dtype)
            self.flat_specs.append(first)

    def pack(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """One tensor a group; `tensors` in the order of the specs."""
        flats = []
        for members in self._groups:
            parts = [self._flat(tensors[i], self.specs[i]) for i in members]
            flats.append(parts[0] if len(parts) == 1 else tf.concat(parts, axis=0))
        return flats

    def unpack(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What `pack` was given."""
        out: list[Any] = [None] * len(self.specs)
        for flat, members in zip(flats, self._groups, strict=True):
            sizes = list(map(self._size, members)) if len(members) > 1 else []
            parts = tf.split(flat, sizes) if sizes else [flat]
            for i, part in zip(members, parts, strict=True):
                out[i] = self._restored(part, self.specs[i])
        return out

    def _flat(self, tensor: Any, spec: tf.TensorSpec) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor, spec.dtype)
        if _goes_alone(spec):
            return tensor
        if self._is_converted(spec):
            tensor = tf.bitcast(tensor, self._word)
        return tf.reshape(tensor, [-1])

    def _restored(self, part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        if _goes_alone(spec):
            return part
        if self._is_converted(spec):
            if spec.dtype.size == 8:
                part = tf.reshape(part, [-1, 2])
            part = tf.bitcast(part, spec.dtype)
        return tf.reshape(part, spec.shape)

    def _is_converted(self, spec: tf.TensorSpec) -> bool:
        return spec.dtype in _WORDS and spec.dtype is not self._word

    def _size(self, i: int) -> int:
        """Elements of a tensor in the flat one."""
        spec = self.specs[i]
        return int(spec.shape.num_elements()) * (spec.dtype.size // 4 if spec.dtype in _WORDS else 1)


def _goes_alone(spec: tf.TensorSpec) -> bool:
    if not spec.shape.is_fully_defined():
        return True
    return int(spec.shape.num_elements()) * max(spec.dtype.size or 0, 1) >= LARGE
