"""Passes over a source of batches whose order is computed, so that reading can begin at any batch.

Making an iterator of TensorFlow's takes longer than many steps of a small model, and an iterator of one pass
cannot read ahead into the next. So such a source is read from one endless iterator (`Passes`) as long as the
passes are read in order, as in most trainings. Small batches of arrays need no iterator: the graph of the
steps takes their rows, many batches at a time (`BufferedPasses`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from dtrain.engine.batches.batch_rows import BatchParts, map_leaves, part_sizes
from dtrain.engine.batches.example_order import ArrayOrder
from dtrain.upstream import keras_adapters


class Seekable(Protocol):
    """A source of batches whose next iterator can begin at any batch.

    Attributes:
        next: where the next iterator begins: the number of the pass, and the number of the batch in it.
        steps: the number of batches in a pass.
    """

    next: tuple[int, int]
    steps: int

    def set_next(self, number: int, first: int) -> None:
        """Makes the next iterator begin at the batch `first` of the pass `number`."""


class Passes:
    """Yields passes over a source, one per iteration.

    Args:
        source: decides where the next pass begins.
        make: makes an endless dataset, whose iterators begin where the last `source.set_next` says.
        alike: whether all passes are equal, so that the iterator may continue with any of them.

    Attributes:
        reader, read: None, or those of `BufferedPasses`.
    """

    reader: RowReader | None = None
    read: Any = None

    def __init__(self, source: Seekable, make: Callable[[], Any], *, alike: bool = False) -> None:
        self._source = source
        self._make = make
        self._first_compared = 1 if alike else 0  # with equal passes, only the batch number is compared
        self._next: tuple[int, int] | None = None  # the pass and the batch of the next read
        self._tensors: Any = None

    @functools.cached_property
    def _data(self) -> Any:
        """What `make` returns, which is slow: it is made at the first read."""
        return self._make()

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self._data.element_spec

    def __iter__(self) -> Pass:
        return Pass(self, *self._source.next, steps=self._source.steps)

    def at(self, position: tuple[int, int]) -> Any:
        """The `SplitIterator.tensors` whose next batch is the one at the position.

        The caller must pass the position after its last read batch to `left_at`.

        Args:
            position: the numbers of the pass and of the batch in it.
        """
        first = self._first_compared
        if self._next is None or self._next[first:] != position[first:]:
            self._tensors = self._begun(position)
        self._next = None
        return self._tensors

    def left_at(self, position: tuple[int, int], buffer: BatchBuffer | None) -> None:
        """Notes the position up to which was read, and the buffer that is left."""
        self._next = position
        self._tensors = self._tensors[0], buffer

    def _begun(self, position: tuple[int, int]) -> tuple[Any, BatchBuffer | None]:
        self._source.set_next(*position)
        return iter(self._data), None

    @property
    def specs(self) -> tuple[Any, BatchBuffer | None]:
        """As `SplitIterator.specs`."""
        iterator, _ = self.at(self._source.next)
        return iterator, None


class BufferedPasses(Passes):
    """Passes that are read without an iterator of TensorFlow's, many batches at a time.

    Args:
        source, alike: as of `Passes`.
        make: returns the arrays that the reader takes rows of.
        reader: reads the batches.
    """

    reader: RowReader

    def __init__(
        self, source: Seekable, make: Callable[[], ArrayRows], reader: RowReader, *, alike: bool = False
    ) -> None:
        super().__init__(source, make, alike=alike)
        self.reader = reader
        self._ahead: Any = None  # a place, and the future of what a thread reads there

    @functools.cached_property
    def read(self) -> Any:
        """The reader's `read`, traced once for all arrays of the same kind."""
        place = tf.TensorSpec([2], tf.int64)
        return traced_read(self.reader).get_concrete_function(self.reader.specs(self._data), place)

    def read_rows(self, position: tuple[int, int]) -> tuple[Any, BatchBuffer]:
        """What `reader` reads from a position on, and the buffer that is left.

        A thread then reads the batches after these, beside the steps of the caller.
        """
        data, buffer = self.at(position)
        ahead, self._ahead = self._ahead, None
        was_read = ahead is not None and ahead[0] is buffer.place
        batches, after = ahead[1].result() if was_read else self._read_on_cpu(data, buffer.place)
        self._ahead = after, _read_thread().submit(self._read_on_cpu, data, after)
        return batches, buffer._replace(place=after)

    def _read_on_cpu(self, data: Any, place: Any) -> tuple[Any, Any]:
        with tf.device("CPU:0"):
            return self.read(data, place)

    @functools.cached_property
    def _buffer_spec(self) -> BatchBuffer:
        batches, place = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), self.read.structured_outputs
        )
        return BatchBuffer(batches, tf.TensorSpec([], tf.int32), place)

    @property
    def element_spec(self) -> Any:
        """As of `Passes`."""
        return tf.nest.map_structure(_of_one, self._buffer_spec.batches)

    @property
    def specs(self) -> tuple[Any, BatchBuffer | None]:
        """As `SplitIterator.specs`."""
        return self.reader.specs(self._data), self._buffer_spec

    def _begun(self, position: tuple[int, int]) -> tuple[Any, BatchBuffer]:
        nothing = tf.nest.map_structure(_none_of, self._buffer_spec.batches)
        return self._data, BatchBuffer(nothing, tf.constant(0), tf.constant(position, tf.int64))


@functools.cache
def _read_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="dtrain-read-ahead")


@functools.lru_cache(maxsize=64)
def rows_between(reader: RowReader) -> Any:
    """A reader's `between` as a function, traced once for all arrays of the same kind."""
    return tf.function(reader.between, autograph=False, reduce_retracing=True)


@functools.lru_cache(maxsize=64)
def traced_read(reader: Any) -> Any:
    """A reader's `read` as a function, traced once for all arrays of the same kind."""
    return tf.function(reader.read, autograph=False)


class Pass:
    """An iterator over one pass.

    Args:
        passes: the passes that it belongs to.
        number: the number of the pass.
        first: the batch to begin with.
        steps: the number of batches in a whole pass.

    Attributes:
        left: the number of batches that are left.
        reader: as of `SplitIterator`.
    """

    def __init__(self, passes: Passes, number: int, first: int, *, steps: int) -> None:
        self._of = passes
        self._number = number
        self._steps = steps
        self.left = steps - first
        self.reader = passes.reader

    @property
    def element_spec(self) -> Any:
        """As `Passes.element_spec`."""
        return self._of.element_spec

    @property
    def specs(self) -> tuple[Any, BatchBuffer | None]:
        """As `SplitIterator.specs`."""
        return self._of.specs

    @property
    def at_once(self) -> int:
        """As `SplitIterator.at_once`."""
        if self.reader is None:
            return 0
        _, buffer = self.tensors()
        self.note(0, buffer)
        if buffer is None or buffer.left():
            return 0
        full = self.left if self.reader.even else self.left - 1
        return min(self.reader.at_once, full)

    def tensors(self) -> tuple[Any, BatchBuffer | None]:
        """As `SplitIterator.tensors`."""
        tensors: tuple[Any, BatchBuffer | None] = self._of.at((self._number, self._steps - self.left))
        return tensors

    def note(self, batches: int, buffer: BatchBuffer | None = None) -> None:
        """Notes the number of batches that were read, and the buffer that remains."""
        self.left -= batches
        next_one = (self._number, self._steps - self.left) if self.left else (self._number + 1, 0)
        self._of.left_at(next_one, buffer)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        source, buffer = self.tensors()
        if buffer is None:
            element = next(source)
        else:
            if not buffer.left():
                buffer = BatchBuffer.read(self._of.read, source, buffer.place)
            element, buffer = buffer.popped()
        self.note(1, buffer)
        return element

    def next_rows(self) -> Any:
        """The rows of the next batches, which a `RowReader` that is `flat` reads together.

        Raises:
            StopIteration: no batch is left.
        """
        if not self.left:
            raise StopIteration
        passes: Any = self._of
        rows, buffer = passes.read_rows((self._number, self._steps - self.left))
        self.note(-(-tf.nest.flatten(rows)[0].shape[0] // passes.reader.order.batch), buffer)
        return rows


class BatchBuffer(NamedTuple):
    """Batches of one pass that were read together.

    Attributes:
        batches: a nest of tensors of shape (batches, ...).
        next: the index of the next batch, an int32 scalar.
        place: where the batches after these are: the numbers of the pass and of the batch in it, int64 of
            shape (2,).
    """

    batches: Any
    next: Any
    place: Any

    @classmethod
    def read(cls, read: Callable[[Any, Any], tuple[Any, Any]], data: Any, place: Any) -> BatchBuffer:
        """A buffer of the batches at a place; `read` is that of a `RowReader`."""
        element, after = read(data, place)
        return cls(element, tf.constant(0), after)

    def size(self) -> Any:
        """The number of batches, those before `next` included."""
        leaf = tf.nest.flatten(self.batches)[0]
        return tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0]

    def left(self) -> Any:
        """Whether there is a next batch, a bool scalar."""
        return self.next < self.size()

    def at(self, number: Any) -> Any:
        """The batch of a number."""
        return tf.nest.map_structure(lambda leaf: tf.gather(leaf, number), self.batches)

    def popped(self) -> tuple[Any, BatchBuffer]:
        """The next batch, and the buffer without it."""
        return self.at(self.next), self._replace(next=self.next + 1)


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


def _of_one(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _none_of(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)


def _in_batches(rows: Any, batches: Any, size: Any) -> Any:
    """Reshapes a leaf with the rows of several batches to (batches, size, ...)."""
    known = tf.cast(tf.stack([batches, size]), tf.int64)
    shaped = tf.reshape(rows, tf.concat([known, tf.shape(rows, tf.int64)[1:]], axis=0))
    return tf.ensure_shape(shaped, [None, size if isinstance(size, int) else None, *rows.shape[1:]])
