"""Reads batches in groups: the rows of many batches at once, for many steps in one XLA program.

It serves a single replica only. Batches for several replicas are split in `splitting.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.engine.batches.batch_rows import Split, batch_rows, map_leaves, present_leaves, row_bytes
from dtrain.engine.feed.array_datasets import tf_dataset
from dtrain.engine.feed.arrays import ArraySource
from dtrain.engine.feed.background_deletion import delete_in_background, start_deleting
from dtrain.engine.feed.input_advice import may_read_ahead
from dtrain.engine.feed.passes import Pass
from dtrain.upstream import tf_data as upstream_data

_BATCHES = 32
"""The most batches in a group. The first step waits until a whole group is read, and any data may be slow."""

_BATCHES_OF_ARRAYS = 1024
"""The same for arrays in memory, whose rows are read in microseconds."""

_BYTES = 8e6  # the most bytes of a group


class Part(NamedTuple):
    """Consecutive batches of equal size in a group.

    Attributes:
        rows: a nest of tensors of shape (batches of a group * width, ...).
        width: rows from the beginning of one batch to the beginning of the next one.
        first: the number of the first batch.
        size: examples in each batch, at most `width`.
        steps: the number of batches.
    """

    rows: Any
    width: int
    first: int
    size: int
    steps: int


class Groups:
    """Batches for the only replica, read in groups. Each iteration is one pass over the data.

    Args:
        source: the source of the batches; it may have its own way to read groups, `in_groups`.
        dataset: yields batches.
        one_by_one: whether each batch is read only when it is needed, so that a group is one batch.
        output_bytes: the bytes of what is computed and kept for each row.

    Attributes:
        dataset: as given.
        batches: the most batches in a group.
        rows: the rows of a batch, if a group is the rows of batches of equal size; else 0.
        rest: whether the rows left over at the end of a group are a smaller batch.
        counted: whether the number of batches was known before reading.
        lazy: whether TensorFlow's iterators are made at the first read. Keras asks for iterators that it
            never reads, and these are then never made. For other data an unread iterator counts too.
    """

    def __init__(self, source: Any, dataset: Any, *, one_by_one: bool, output_bytes: int) -> None:
        self.dataset = dataset
        self.rows, self.rest = 0, True
        self.lazy = bool(source.counted)
        self.counted = self.lazy or int(dataset.cardinality()) >= 0
        own = getattr(source, "in_groups", None)
        self._groups: Any = None
        if own is not None and dataset is source.dataset:
            most = 1 if one_by_one else _most(source, dataset, _BATCHES_OF_ARRAYS, output_bytes)
            # Groups of all passes have one shape. A power of two is the shape of many lengths of a pass.
            self.batches = min(most, 1 << (source.steps - 1).bit_length())
            self._groups, self.rows = own(self.batches), source.batch
        if self._groups is None:
            self.batches = 1 if one_by_one else _most(source, dataset, _BATCHES, output_bytes)
            self._group_dataset(tf_dataset(dataset))

    def _group_dataset(self, dataset: tf.data.Dataset) -> None:
        self._groups, self.rows = dataset, 0
        if self.batches > 1:
            self._groups, self.rows, self.rest = upstream_data.in_larger_batches(dataset, self.batches)
            if self._groups is None:
                self._groups = _padded(dataset, self.batches)

    def __iter__(self) -> GroupIterator:
        return GroupIterator(self)

    def begin(self) -> Any:
        """An iterator over groups: TensorFlow's, or a `Pass`."""
        return iter(self._groups)


class GroupIterator:
    """One iteration over groups.

    Args:
        groups: what is iterated over.

    Attributes:
        element_spec: the spec of a batch, as of a `SplitIterator`.
        counted: as of `Groups`.
    """

    def __init__(self, groups: Groups) -> None:
        self.element_spec = ((groups.dataset.element_spec,), None)
        self.counted = groups.counted
        start_deleting()
        self._of = groups
        self._iterator = None if groups.lazy else groups.begin()
        self._group: Any = None
        self._sizes: list[int] = []
        self._width = 0
        self._next = 0

    def take(self, most: int) -> Part | None:
        """The next batches of equal size, at most `most` of them; None at the end of the data."""
        if self._next == len(self._sizes) and not self._read():
            return None
        first, size = self._next, self._sizes[self._next]
        last = first + 1
        while last < len(self._sizes) and last - first < most and self._sizes[last] == size:
            last += 1
        self._next = last
        return Part(self._group, self._width, first, size, last - first)

    def _read(self) -> bool:
        if self._iterator is None:
            self._iterator = self._of.begin()
        try:
            element = self._iterator.next_rows() if isinstance(self._iterator, Pass) else next(self._iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return False
        self._next = 0
        if self._of.batches == 1:
            self._width = int(batch_rows(element))
            self._sizes = [self._width]
            self._group = element
        elif self._of.rows:
            rows = int(batch_rows(element))
            whole, rest = divmod(rows, self._of.rows)
            rests = [rest] if rest and self._of.rest else []
            self._width, self._sizes = self._of.rows, [self._of.rows] * whole + rests
            self._group = self._filled(element)
        else:
            batches, sizes = element
            self._sizes = [int(size) for size in sizes.numpy()]
            self._width = max(self._sizes)
            self._group = self._filled(self._packed(map_leaves(_flat, batches)))
        return bool(self._sizes)

    def _packed(self, leaves: Any) -> Any:
        """Packs the present leaves of a batch into the structure of the dataset's elements."""
        rest = iter(leaves)
        return map_leaves(lambda leaf: None if leaf is None else next(rest), self.element_spec[0][0])

    def _filled(self, group: Any) -> Any:
        """Pads a group with rows of zeros, so that all groups have one shape; no step uses these rows."""
        rows = self._of.batches * self._width

        def one(leaf: Any) -> Any:
            if leaf is None or leaf.shape[0] == rows:
                return leaf
            return tf.pad(leaf, [[0, rows - leaf.shape[0]], *[[0, 0]] * (leaf.shape.rank - 1)])

        return map_leaves(one, group)

    def __iter__(self) -> GroupIterator:
        return self

    def __del__(self) -> None:
        delete_in_background(self.__dict__.pop("_iterator", None))

    def __next__(self) -> Split:
        part = self.take(1)
        if part is None:
            raise StopIteration
        return Split((batch_of(part),), None)


def batch_of(part: Part) -> Any:
    """The first batch of a part."""
    start = part.first * part.width
    return map_leaves(lambda leaf: None if leaf is None else leaf[start : start + part.size], part.rows)


def can_be_grouped(source: Any, dataset: tf.data.Dataset) -> bool:
    """Whether batches may be read ahead, and are dense numbers of known shape but for the number of rows.

    Args:
        source: the source of the batches.
        dataset: yields batches.
    """
    leaves = present_leaves(dataset.element_spec)
    readable = isinstance(source, ArraySource) or may_read_ahead(dataset)
    return bool(readable and leaves) and all(
        isinstance(leaf, tf.TensorSpec)
        and leaf.dtype != tf.string
        and bool(leaf.shape.rank)
        and None not in leaf.shape[1:]
        for leaf in leaves
    )


def batch_size_of(source: Any, dataset: tf.data.Dataset) -> int | None:
    """Examples in a batch; None if that is not known before a batch is read."""
    sizes = {leaf.shape[0] for leaf in present_leaves(dataset.element_spec)}
    if len(sizes) == 1 and None not in sizes:
        return int(sizes.pop())
    size = getattr(source, "batch", None) or upstream_data.batch_size(dataset)
    return None if size is None else int(size)


def _most(source: Any, dataset: tf.data.Dataset, batches: int, output_bytes: int) -> int:
    """How many batches a group may have, at most `batches`."""
    rows = batch_size_of(source, dataset) or 256
    size = rows * max(sum(map(row_bytes, present_leaves(dataset.element_spec))), output_bytes)
    return max(1, min(batches, int(_BYTES // max(1, size))))


def _padded(dataset: tf.data.Dataset, batches: int) -> tf.data.Dataset:
    """A dataset of groups of batches of different sizes: padded to the largest of a group, and the sizes."""
    sized = dataset.map(
        tf.autograph.experimental.do_not_convert(
            lambda *batch: (tuple(present_leaves(batch)), batch_rows(batch))
        )
    )
    return sized.padded_batch(batches).prefetch(2)


def _flat(leaf: Any) -> Any:
    return tf.reshape(leaf, [-1, *leaf.shape[2:]])
