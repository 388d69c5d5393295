"""Collects the batches of a block: plain tensors are concatenated; any other batch is a block of its own.

`BlockReader` takes all batches of a block from a TensorFlow iterator in one call, because one call a batch
costs more than a small model's step. How many batches a block has is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain import events
from dtrain.keras_engine.input import map_leaves, present_leaves, to_tensors


@dataclass
class BlockData:
    """The data of one block.

    Attributes:
        spec: the spec of one batch.
        many: whether `values` holds concatenated batches; else it is one batch, unchanged.
        sizes: rows of each leaf in each batch, int32 of shape (leaves, batches); shape (0, 0) if not `many`.
        values: one concatenated tensor for each leaf, or the batch.
        count: the number of batches.
    """

    spec: Any
    many: bool
    sizes: np.ndarray
    values: Any
    count: int

    @property
    def rows(self) -> int | None:
        """The number of examples in all batches; None if not `many`."""
        return int(self.sizes[0].sum()) if len(self.sizes) else None


class BlockReader:
    """Takes many batches at once from iterators over a dataset.

    Args:
        spec: the spec of the dataset's elements: dense tensors whose shapes may differ in the first dimension
            only.

    Attributes:
        spec: as given.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self._leaves: list[tf.TensorSpec] = present_leaves(spec)
        self._read = tf.function(self._take, autograph=False)

    @staticmethod
    def reads(spec: Any) -> bool:
        """Whether a `BlockReader` can read elements of this spec."""
        leaves = present_leaves(spec)
        return bool(leaves) and all(map(_is_plain, leaves))

    def read(self, iterator: Any, most: int) -> BlockData | None:
        """Reads the next batches, at most `most`; returns None at the end of the data."""
        with events.part("input"):
            sizes, values = self._read(iterator, tf.constant(most))
            count = int(sizes.shape[0])
        return BlockData(self.spec, True, sizes.numpy().T, values, count) if count else None

    def _take(self, iterator: Any, most: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        arrays = [
            tf.TensorArray(leaf.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=leaf.shape)
            for leaf in self._leaves
        ]
        sizes = tf.TensorArray(tf.int32, 0, dynamic_size=True, element_shape=[len(arrays)])

        def write(i: tf.Tensor, optional: Any, sizes: Any, arrays: list[Any]) -> Any:
            parts = present_leaves(optional.get_value())
            arrays = [array.write(i, part) for array, part in zip(arrays, parts, strict=True)]
            return sizes.write(i, tf.stack([tf.shape(part)[0] for part in parts])), arrays

        def body(i: tf.Tensor, more: tf.Tensor, sizes: Any, *arrays: Any) -> Any:
            optional = iterator.get_next_as_optional()
            more = optional.has_value()
            sizes, arrays = tf.cond(
                more, lambda: write(i, optional, sizes, list(arrays)), lambda: (sizes, list(arrays))
            )
            return [i + tf.cast(more, tf.int32), more, sizes, *arrays]

        found = tf.while_loop(
            lambda i, more, *_: tf.logical_and(more, i < most),
            body,
            [tf.constant(0), tf.constant(True), sizes, *arrays],
            parallel_iterations=1,
        )
        return found[2].stack(), [array.concat() for array in found[3:]]


class Batches:
    """Collects batches that were taken one by one, until they become a block.

    Attributes:
        spec, many: as in `BlockData`.
        count: the number of batches collected.
        bytes: their total size in bytes; a huge number for a batch that must be a block of its own.
    """

    def __init__(self) -> None:
        self._key: str | None = None
        self.spec: Any = None
        self.many = True
        self._rows: list[list[Any]] = []
        self._batch: Any = None
        self._ready: tuple[int, Any, Any, str, bool] | None = None
        self.count = 0
        self.bytes = 0

    def fits(self, batch: Any, spec: Any) -> bool:
        """Whether a batch can be in the same block as the batches collected so far."""
        _, _, _, key, many = self._prepare(batch, spec)
        return self.count == 0 or (many and self.many and key == self._key)

    def add(self, batch: Any, spec: Any, *, alone: bool = False) -> None:
        """Adds a batch, for which `fits` must be true; `alone` makes it a block of its own."""
        _, batch, spec, key, many = self._prepare(batch, spec)
        many = many and not alone
        self._ready = None
        self._key, self.spec, self.many = key, spec, many
        self.count += 1
        if many:
            leaves = present_leaves(batch)
            self._rows.append(leaves)
            self.bytes += sum(bytes_of(leaf) for leaf in leaves)
        else:
            self._batch = batch
            self.bytes = 1 << 62  # a block of its own

    def take(self) -> BlockData:
        """Returns the collected batches as a block, and starts again with none."""
        if self.many:
            columns = list(zip(*self._rows, strict=True))
            sizes = np.array([[len(leaf) for leaf in column] for column in columns], np.int32)
            sizes = sizes.reshape(len(columns), self.count)
            values: Any = [c[0] if len(c) == 1 else tf.concat(c, axis=0) for c in columns]
        else:
            sizes, values = np.zeros((0, 0), np.int32), self._batch
        data = BlockData(self.spec, self.many, sizes, values, self.count)
        self.__init__()  # type: ignore[misc]
        return data

    def _prepare(self, batch: Any, spec: Any) -> tuple[int, Any, Any, str, bool]:
        if self._ready is None or self._ready[0] != id(batch):
            tensors = to_tensors(batch)
            spec = map_leaves(_any_rows, tensors) if spec is None else spec
            self._ready = (id(batch), tensors, spec, *_key(tensors, spec))
        return self._ready


def _is_plain(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return False
    return bool(spec.shape[1:].is_fully_defined())


def _key(batch: Any, spec: Any) -> tuple[str, bool]:
    """The key that batches of one block must share, and whether this batch can be concatenated at all."""
    kinds: list[Any] = []

    def one(leaf: Any) -> None:
        plain = isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None and leaf.shape.rank > 0
        kinds.append((leaf.dtype, leaf.shape[1:]) if plain else (None if leaf is None else "single"))

    map_leaves(one, batch)
    usable = "single" not in kinds and any(kind is not None for kind in kinds)
    return f"{kinds}{spec}", usable


def _any_rows(leaf: Any) -> Any:
    """The spec of a tensor, with an unknown number of rows."""
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def bytes_of(leaf: tf.Tensor) -> int:
    """The size of a tensor in bytes; a string counts as one reference (8 bytes), whatever its length."""
    return int(leaf.shape.num_elements() or 0) * max(leaf.dtype.size or 0, 1)
