"""Puts batches together to a block: concatenated where they are plain tensors, one by one where not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.keras_engine.input import map_leaves, to_tensors


@dataclass
class BlockData:
    """The data of one block.

    Attributes:
        spec: of one batch.
        many: whether `values` are concatenated batches; else they are one batch.
        sizes: rows by leaf and batch, int32 of shape (leaves, batches); (0, 0) for a single batch.
        values: a list of tensors, or the batch.
        count: how many batches.
    """

    spec: Any
    many: bool
    sizes: np.ndarray
    values: Any
    count: int


class Batches:
    """Batches that are waiting to become a block."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._spec: Any = None
        self._many = True
        self._rows: list[list[Any]] = []
        self._batch: Any = None
        self._ready: tuple[int, Any, Any, str, bool] | None = None
        self.count = 0
        self.bytes = 0

    def fits(self, batch: Any, spec: Any) -> bool:
        """Whether a batch can go into one block with those that are here."""
        _, _, _, key, many = self._prepare(batch, spec)
        return self.count == 0 or (many and self._many and key == self._key)

    def add(self, batch: Any, spec: Any, *, alone: bool = False) -> None:
        """Takes a batch that fits; `alone`: as a block of its own."""
        _, batch, spec, key, many = self._prepare(batch, spec)
        many = many and not alone
        self._ready = None
        self._key, self._spec, self._many = key, spec, many
        self.count += 1
        if many:
            leaves: list[Any] = []
            map_leaves(lambda leaf: leaf if leaf is None else leaves.append(leaf), batch)
            self._rows.append(leaves)
            self.bytes += sum(_bytes(leaf) for leaf in leaves)
        else:
            self._batch = batch
            self.bytes = 1 << 62  # a block of its own

    def take(self) -> BlockData:
        """The block; nothing waits any more."""
        if self._many:
            columns = list(zip(*self._rows, strict=True))
            sizes = np.array([[len(leaf) for leaf in column] for column in columns], np.int32)
            sizes = sizes.reshape(len(columns), self.count)
            values: Any = [c[0] if len(c) == 1 else tf.concat(c, axis=0) for c in columns]
        else:
            sizes, values = np.zeros((0, 0), np.int32), self._batch
        data = BlockData(self._spec, self._many, sizes, values, self.count)
        self.__init__()  # type: ignore[misc]
        return data

    def _prepare(self, batch: Any, spec: Any) -> tuple[int, Any, Any, str, bool]:
        if self._ready is None or self._ready[0] != id(batch):
            tensors = to_tensors(batch)
            spec = map_leaves(_any_rows, tensors) if spec is None else spec
            self._ready = (id(batch), tensors, spec, *_key(tensors, spec))
        return self._ready


def _key(batch: Any, spec: Any) -> tuple[str, bool]:
    """What two batches must have in common to lie in one block, and whether these can at all."""
    kinds: list[Any] = []

    def one(leaf: Any) -> None:
        plain = isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None and leaf.shape.rank > 0
        kinds.append((leaf.dtype, leaf.shape[1:]) if plain else (None if leaf is None else "single"))

    map_leaves(one, batch)
    usable = "single" not in kinds and any(kind is not None for kind in kinds)
    return f"{kinds}{spec}", usable


def _any_rows(leaf: Any) -> Any:
    """The spec of a tensor, with any number of rows."""
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _bytes(leaf: tf.Tensor) -> int:
    return int(leaf.shape.num_elements() or 0) * max(leaf.dtype.size or 0, 1)
