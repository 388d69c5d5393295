"""Packs many small tensors into a few flat ones, so that they need one round trip and not one each.

Large tensors are not packed, because copying them costs more than their own messages. It sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_WORDS = (tf.float32, tf.int32, tf.uint32, tf.float64, tf.int64, tf.uint64)

LARGE = 256 << 10
"""Size in bytes from which a tensor is not packed: copying that much takes about as long as a message."""


class Packing:
    """The layout of tensors in flat ones: all 4- and 8-byte numbers share one, other dtypes have one each.

    The flat tensor of the 4- and 8-byte numbers is float32 if any tensor is, since most are and then need no
    conversion; else int32. Numbers of other dtypes are bitcast, so no value changes. Large tensors, and those
    without a fully defined shape, are not packed.

    Args:
        specs: the dtype and shape of every tensor.

    Attributes:
        specs: as given.
        flat_specs: the specs of the tensors that `pack` returns.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self.specs = list(specs)
        self._word = tf.float32 if any(spec.dtype is tf.float32 for spec in self.specs) else tf.int32
        together: dict[str, list[int]] = {}
        for i, spec in enumerate(self.specs):
            key = f"alone {i}" if _goes_alone(spec) else self._flat_dtype(spec).name
            together.setdefault(key, []).append(i)
        self._groups = list(together.values())  # the indices of the tensors in each flat one
        self.flat_specs: list[tf.TensorSpec] = []
        for members in self._groups:
            first = self.specs[members[0]]
            if not _goes_alone(first):
                first = tf.TensorSpec([sum(map(self._size, members))], self._flat_dtype(first))
            self.flat_specs.append(first)

    def pack(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Packs tensors, given in the order of `specs`; returns tensors of `flat_specs`."""
        flats = []
        for members in self._groups:
            parts = [self._flat(tensors[i], self.specs[i]) for i in members]
            flats.append(parts[0] if len(parts) == 1 else tf.concat(parts, axis=0))
        return flats

    def unpack(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors that `pack` was given."""
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
        if self._flat_dtype(spec) is not spec.dtype:
            tensor = tf.bitcast(tensor, self._word)
        return tf.reshape(tensor, [-1])

    def _restored(self, part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        if _goes_alone(spec):
            return part
        if self._flat_dtype(spec) is not spec.dtype:
            if spec.dtype.size == 8:
                part = tf.reshape(part, [-1, 2])
            part = tf.bitcast(part, spec.dtype)
        return tf.reshape(part, spec.shape)

    def _flat_dtype(self, spec: tf.TensorSpec) -> tf.DType:
        return self._word if spec.dtype in _WORDS else spec.dtype

    def _size(self, i: int) -> int:
        """How many elements of the flat tensor a tensor takes."""
        spec = self.specs[i]
        return int(spec.shape.num_elements()) * (spec.dtype.size // 4 if spec.dtype in _WORDS else 1)


def _goes_alone(spec: tf.TensorSpec) -> bool:
    if not spec.shape.is_fully_defined():
        return True
    return int(spec.shape.num_elements()) * max(spec.dtype.size or 0, 1) >= LARGE
