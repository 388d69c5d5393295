"""Collects the batches of a block: plain tensors are concatenated; any other batch is a block of its own.

`BlockReader` takes all batches of a block from a TensorFlow iterator in one call, because one call a batch
costs more than a small model's step. Arrays need no such iterator (`PassRows`). How many batches a block has
is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dtrain.engine.batches.batch_rows import map_leaves, present_leaves, to_tensors
from dtrain.engine.feed.arrays import ArraySource
from dtrain.telemetry import events
from dtrain.upstream import tf_tracing


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


class PassRows:
    """Iterates over one pass of arrays, and reads whole blocks of it without an iterator of TensorFlow's.

    Args:
        source: the arrays; `source.reads_rows` must be true. The pass begins at `source.next`.

    Attributes:
        element_spec: the spec of a batch.
    """

    def __init__(self, source: ArraySource) -> None:
        self.element_spec = source.dataset.element_spec
        self._source = source
        self._number, self._first = source.next
        self._batches: Any = None
        # What was read ahead: the leaves of the batches from `_begin` to before `_end`.
        self._ahead: list[np.ndarray] = []
        self._begin = self._end = 0

    def __iter__(self) -> PassRows:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._source.set_next(self._number, self._first)
            self._batches = iter(self._source.dataset)
        batch = next(self._batches)
        self._first += 1
        return batch

    def read(self, spec: Any, most: int) -> BlockData | None:
        """The next batches, at most `most`; None at the end of the pass."""
        count = min(most, self._source.steps - self._first)
        if count <= 0:
            return None
        sizes = self._source.sizes(self._first, count)
        leaves = self._rows(spec, count, sum(sizes))
        self._first += count
        self._batches = None  # it would yield the batches that are read here
        return BlockData(spec, True, np.array([sizes] * len(leaves), np.int32), leaves, count)

    def _rows(self, spec: Any, count: int, rows: int) -> list[tf.Tensor]:
        """The leaves of the next batches; a call reads small ones for the blocks after this one too."""
        first, end = self._first, self._first + count
        if not self._begin <= first < end <= self._end:
            ahead = max(count, min(self._source.at_once, self._source.steps - first))
            read = self._source.rows(self._number, first, ahead)
            # A function that was traced for other arrays may give a dictionary's entries in another order.
            leaves = present_leaves(tf.nest.pack_sequence_as(spec, tf.nest.flatten(read)))
            if ahead == count:
                return leaves
            self._ahead, self._begin, self._end = [leaf.numpy() for leaf in leaves], first, first + ahead
        skipped = (first - self._begin) * self._source.batch
        with tf.device("CPU:0"):
            # A tenth of the time of slicing a tensor.
            return [tf.constant(leaf[skipped : skipped + rows]) for leaf in self._ahead]


class BlockReader:
    """Takes many batches at once from iterators over a dataset.

    Args:
        spec: the spec of the dataset's elements: dense tensors whose shapes may differ in the first dimension
            only.

    Attributes:
        spec: as given.
        batch_bytes: the bytes of a batch, as the mean of the newest block; 0 before the first.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.batch_bytes = 0
        self._leaves: list[tf.TensorSpec] = present_leaves(spec)
        self._read = tf_tracing.made_for_each_model(self._take)

    @staticmethod
    def reads(spec: Any) -> bool:
        """Whether a `BlockReader` can read elements of this spec."""
        leaves = present_leaves(spec)
        return bool(leaves) and all(map(_is_plain, leaves))

    def read(self, iterator: Any, most: int) -> BlockData | None:
        """Reads the next batches, at most `most`; returns None at the end of the data."""
        with events.part("input"):
            if isinstance(iterator, PassRows):
                data = iterator.read(self.spec, most)
            else:
                sizes, values = self._read(iterator, tf.constant(most))
                count = int(sizes.shape[0])
                data = BlockData(self.spec, True, sizes.numpy().T, values, count) if count else None
        if data is not None:
            self.batch_bytes = sum(map(bytes_of, data.values)) // data.count
        return data

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

        state = tf.while_loop(
            lambda i, more, *_: tf.logical_and(more, i < most),
            body,
            [tf.constant(0), tf.constant(True), sizes, *arrays],
            parallel_iterations=1,
        )
        return state[2].stack(), [array.concat() for array in state[3:]]


class Batch(NamedTuple):
    """One batch, as tensors.

    Attributes:
        tensors: the batch.
        spec: its nest of `tf.TypeSpec`s.
        key: what all batches of one block have in common; None for a batch that must be a block of its own.
    """

    tensors: Any
    spec: Any
    key: str | None


def as_batch(batch: Any, spec: Any, *, alone: bool = False) -> Batch:
    """Converts a batch to tensors, and finds out which batches it can be in one block with.

    Args:
        batch: a nest of arrays or tensors.
        spec: its nest of `tf.TypeSpec`s; None derives it from the batch, with any number of rows.
        alone: whether the batch becomes a block of its own in any case.
    """
    tensors = to_tensors(batch)
    spec = map_leaves(_any_rows, tensors) if spec is None else spec
    kinds: list[Any] = []

    def note(leaf: Any) -> None:
        plain = isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None and leaf.shape.rank > 0
        kinds.append((leaf.dtype, leaf.shape[1:]) if plain else (None if leaf is None else "single"))

    map_leaves(note, tensors)
    joins = "single" not in kinds and any(kind is not None for kind in kinds) and not alone
    return Batch(tensors, spec, f"{kinds}{spec}" if joins else None)


class BlockBuffer:
    """Collects batches that were taken one by one, until they become a block.

    Attributes:
        bytes: the size of all collected batches.
    """

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def fits(self, batch: Batch) -> bool:
        """Whether a batch can be in the same block as the batches collected so far."""
        return not self._batches or (batch.key is not None and batch.key == self._batches[0].key)

    def add(self, batch: Batch) -> None:
        """Adds a batch, for which `fits` must be true."""
        self._batches.append(batch)
        if batch.key is not None:
            self.bytes += sum(bytes_of(leaf) for leaf in present_leaves(batch.tensors))

    def take(self) -> BlockData:
        """Returns the collected batches as a block, and starts again with none."""
        batches, self._batches, self.bytes = self._batches, [], 0
        first = batches[0]
        if first.key is None:
            return BlockData(first.spec, False, np.zeros((0, 0), np.int32), first.tensors, 1)
        columns = list(zip(*(present_leaves(batch.tensors) for batch in batches), strict=True))
        sizes = np.array([[len(leaf) for leaf in column] for column in columns], np.int32)
        values = [c[0] if len(c) == 1 else tf.concat(c, axis=0) for c in columns]
        return BlockData(first.spec, True, sizes, values, len(batches))


def _is_plain(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return False
    return bool(spec.shape[1:].is_fully_defined())


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
