"""Reads the rows of arrays in the graph, of many batches at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.engine.batches.batch_rows import BatchParts, map_leaves, part_sizes
from dtrain.engine.batches.example_order import ArrayOrder
from dtrain.upstream import keras_adapters


class ArrayRows(NamedTuple):
    """The data of a `RowReader`.

    Attributes:
        values: a nest of arrays.
        begun: what `ArrayOrder.begun` returned, int64 of shape (n,).
        rows: the number of rows of the arrays, an int64 scalar.
    """

    values: Any
    begun: Any
    rows: Any


@dataclass(frozen=True)
class RowReader:
    """Reads rows of arrays: this process' parts of several equal batches, or all rows between two positions.

    Attributes:
        order: the order of the rows; its number of rows and its seed are not read.
        parts: which parts of each batch `read` takes.
        at_once: the most batches that `read` takes.
        even: whether the last batch of a pass is full. If not, `read` takes it alone.
        flat: whether `read` gives one tensor of the rows of all batches.
    """

    order: ArrayOrder
    parts: BatchParts
    at_once: int
    even: bool
    flat: bool = False

    def read(self, data: ArrayRows, place: Any) -> tuple[Any, Any]:
        """A nest of tensors, and the place of the batch after these.

        The tensors' shape is (batches, rows, ...); if `flat`, (batches * rows, ...).

        Args:
            data: the arrays.
            place: the numbers of the pass and of the first batch in it, int64 of shape (2,).
        """
        order, batch = replace(self.order, rows=data.rows), self.order.batch
        number, first = tf.unstack(place)
        full, rest = data.rows // batch, data.rows % batch
        count = tf.minimum(tf.constant(self.at_once, tf.int64), full - first)
        size: Any = batch
        if not self.even:
            last = first >= full
            count = tf.where(last, tf.constant(1, tf.int64), count)
            size = tf.where(last, rest, batch)
        starts = (first + tf.range(count))[:, tf.newaxis] * batch

        def part(low: Any, high: Any) -> Any:
            places = tf.reshape(starts + tf.range(low, high, dtype=tf.int64), [-1])
            rows = keras_adapters.some_rows(data.values, order.rows_at(places, first, number, data.begun))
            return rows if self.flat else map_leaves(lambda leaf: _in_batches(leaf, count, high - low), rows)

        parts = [part(*bounds) for bounds in self.parts.bounds(size)]
        after = first + count
        ended = after >= (full if self.even else full + 1)
        following = tf.where(ended, tf.stack([number + 1, 0]), tf.stack([number, after]))
        if self.parts.replicas == 1:
            return parts[0], following
        sizes = part_sizes(size, self.parts.replicas)
        return (tuple(parts), tf.broadcast_to(sizes, [count, self.parts.replicas])), following

    def between(self, data: ArrayRows, number: Any, low: Any, high: Any) -> Any:
        """The rows of a pass from `low` to before `high`, a nest of tensors of shape (high - low, ...)."""
        order, places = replace(self.order, rows=data.rows), tf.range(low, high)
        rows = order.rows_at(places, tf.zeros([], tf.int64), number, data.begun)
        return keras_adapters.some_rows(data.values, rows)

    def specs(self, data: ArrayRows) -> ArrayRows:
        """The specs of `data`, for a function that reads arrays of any length."""

        def of_any_length(leaf: Any) -> Any:
            return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

        values = map_leaves(of_any_length, data.values)
        return ArrayRows(values, tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64))


@functools.lru_cache(maxsize=64)
def rows_between(reader: RowReader) -> Any:
    """A reader's `between` as a function, traced once for all arrays of the same kind."""
    return tf.function(reader.between, autograph=False, reduce_retracing=True)


@functools.lru_cache(maxsize=64)
def traced_read(reader: Any) -> Any:
    """A reader's `read` as a function, traced once for all arrays of the same kind."""
    return tf.function(reader.read, autograph=False)


def _in_batches(rows: Any, batches: Any, size: Any) -> Any:
    """Reshapes a leaf with the rows of several batches to (batches, size, ...)."""
    known = tf.cast(tf.stack([batches, size]), tf.int64)
    shaped = tf.reshape(rows, tf.concat([known, tf.shape(rows, tf.int64)[1:]], axis=0))
    return tf.ensure_shape(shaped, [None, size if isinstance(size, int) else None, *rows.shape[1:]])
