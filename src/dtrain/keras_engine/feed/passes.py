"""Passes over data that can begin at any batch, all read from one TensorFlow iterator.

Making an iterator takes longer than a step of a small model, and an iterator of one pass cannot read ahead
into the next. So one endless iterator is used as long as the passes are read in order, as in most trainings.
What a pass holds is not decided here, but by the source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf


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
        each: the batches in one element of the dataset; the last element of a pass may have fewer.
        alike: whether all passes are equal, so that the iterator may continue with any of them.
        buffered: whether an element holds several batches of one pass, each leaf of shape (batches, ...),
            which are yielded one by one. Taking a batch from a buffer is much faster than reading one.

    Attributes:
        each, buffered: as given.
        buffer: the batches that were read and not yielded yet; None if not `buffered`.
    """

    def __init__(
        self,
        source: Seekable,
        make: Callable[[], tf.data.Dataset],
        *,
        each: int = 1,
        alike: bool = False,
        buffered: bool = False,
    ) -> None:
        self.each = each
        self.buffered = buffered
        self.buffer: BatchBuffer | None = None
        self._source = source
        self._make = make
        self._alike = alike
        self._iterator: Any = None
        self._next: tuple[int, int] | None = None  # the pass and the batch of the next read

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        """The dataset, made at the first read because making it is slow."""
        return self._make()

    @property
    def element_spec(self) -> Any:
        """The spec of what an iteration yields: a batch, or several if `each` is greater."""
        spec = self._dataset.element_spec
        return tf.nest.map_structure(_of_one, spec) if self.buffered else spec

    def __iter__(self) -> Pass:
        return Pass(self, *self._source.next, steps=self._source.steps)

    def at(self, position: tuple[int, int]) -> Any:
        """TensorFlow's iterator, whose next batch is the one at the position.

        The caller must pass the position after its last read batch to `left_at`. If batches are buffered,
        those in `buffer` come first.

        Args:
            position: the numbers of the pass and of the batch in it.
        """
        first = 1 if self._alike else 0  # with equal passes, only the batch number is compared
        if self._next is None or self._next[first:] != position[first:]:
            self._source.set_next(*position)
            self._iterator = iter(self._dataset)
            self.buffer = BatchBuffer.empty(self._dataset.element_spec) if self.buffered else None
        self._next = None
        return self._iterator

    def left_at(self, position: tuple[int, int]) -> None:
        """Notes the position up to which the iterator was read."""
        self._next = position


class Pass:
    """An iterator over one pass.

    Args:
        passes: the passes that it belongs to.
        number: the number of the pass.
        first: the batch to begin with.
        steps: the number of batches in a whole pass.

    Attributes:
        left: the number of batches that are left.
    """

    def __init__(self, passes: Passes, number: int, first: int, *, steps: int) -> None:
        self._of = passes
        self._number = number
        self._steps = steps
        self.left = steps - first

    @property
    def element_spec(self) -> Any:
        """As `Passes.element_spec`."""
        return self._of.element_spec

    @property
    def buffered(self) -> bool:
        """Whether its batches come in buffers."""
        return self._of.buffered

    def tensors(self) -> tuple[Any, BatchBuffer | None]:
        """TensorFlow's iterator, and the buffer to read before it, or None.

        The caller must pass the number of batches that it read, and the remaining buffer, to `note`.
        """
        iterator = self._of.at((self._number, self._steps - self.left))
        return iterator, self._of.buffer

    def note(self, batches: int, buffer: BatchBuffer | None = None) -> None:
        """Notes the number of batches that were read, and the buffer that remains."""
        self._of.buffer = buffer
        self.left -= batches
        next_one = (self._number, self._steps - self.left) if self.left else (self._number + 1, 0)
        self._of.left_at(next_one)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        iterator, buffer = self.tensors()
        if buffer is None:
            element = next(iterator)
        else:
            if not buffer.left():
                buffer = BatchBuffer.of(next(iterator))
            element, buffer = buffer.popped()
        self.note(min(self._of.each, self.left), buffer)
        return element


class BatchBuffer(NamedTuple):
    """Batches of one pass that were read together.

    Attributes:
        batches: a nest of tensors of shape (batches, ...).
        next: the index of the next batch, an int32 scalar.
    """

    batches: Any
    next: Any

    @classmethod
    def empty(cls, spec: Any) -> BatchBuffer:
        """An empty buffer for elements of this spec."""
        return cls.of(tf.nest.map_structure(_none_of, spec))

    @classmethod
    def of(cls, element: Any) -> BatchBuffer:
        """A buffer with all batches of an element."""
        return cls(element, tf.constant(0))

    @staticmethod
    def spec(spec: Any) -> BatchBuffer:
        """The specs of a buffer, from the spec of its element."""
        return BatchBuffer(spec, tf.TensorSpec([], tf.int32))

    def left(self) -> Any:
        """Whether there is a next batch, a bool scalar."""
        leaf = tf.nest.flatten(self.batches)[0]
        return self.next < (tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0])

    def popped(self) -> tuple[Any, BatchBuffer]:
        """The next batch, and the buffer without it."""
        batch = tf.nest.map_structure(lambda leaf: tf.gather(leaf, self.next), self.batches)
        return batch, BatchBuffer(self.batches, self.next + 1)


def _of_one(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _none_of(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)
