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
from typing import Any, Protocol

import tensorflow as tf

from dtrain.engine.feed.batch_buffer import BatchBuffer
from dtrain.engine.feed.row_reader import ArrayRows, RowReader, traced_read


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


def _of_one(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _none_of(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)
