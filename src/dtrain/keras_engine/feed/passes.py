"""Passes over data that can begin at any batch, all from one iterator of TensorFlow's.

Making an iterator takes longer than the step of a small model, and it reads nothing ahead beyond its end. So
one iterator serves as long as the passes are read in order, as most training does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf


class Seekable(Protocol):
    """A source of batches whose next iterator can begin anywhere.

    Attributes:
        next: the number of the pass that begins next, and its first batch.
        steps: batches in a pass.
    """

    next: tuple[int, int]
    steps: int

    def set_next(self, number: int, first: int) -> None:
        """The next iterator begins there."""


class Passes:
    """Pass after pass.

    Args:
        source: says where a pass begins.
        make: makes an endless dataset, whose iterator begins where `source.set_next` said before.
        each: batches in one element; the last of a pass may have fewer.
        alike: whether all passes are the same, so that any may follow any other.
        buffered: whether an element holds several batches of one pass, each leaf of shape (batches, ...),
            which are given one by one. Taking a batch from a buffer is much faster than reading one.

    Attributes:
        each, buffered: as given.
        buffer: the batches that were read and not given yet, if they are buffered.
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
        self._next: tuple[int, int] | None = None  # batch of the iterator, or of the buffer

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        """Made at the first read: making it takes longer than reading a little."""
        return self._make()

    @property
    def element_spec(self) -> Any:
        """Of a batch."""
        spec = self._dataset.element_spec
        return tf.nest.map_structure(_of_one, spec) if self.buffered else spec

    def __iter__(self) -> Pass:
        return Pass(self, *self._source.next, steps=self._source.steps)

    def at(self, position: tuple[int, int]) -> Any:
        """TensorFlow's iterator, whose next batch is that of the position.

        The caller tells `left_at` how far it has read. If batches are buffered, `buffer` comes before the
        iterator.
        """
        first = 1 if self._alike else 0  # what counts of a position
        if self._next is None or self._next[first:] != position[first:]:
            self._source.set_next(*position)
            self._iterator = iter(self._dataset)
            self.buffer = BatchBuffer.empty(self._dataset.element_spec) if self.buffered else None
        self._next = None
        return self._iterator

    def left_at(self, position: tuple[int, int]) -> None:
        """Notes how far the iterator was read."""
        self._next = position


class Pass:
    """One pass, to iterate over.

    Args:
        passes: to which it belongs.
        number: of the pass.
        first: the batch to begin with.
        steps: batches in a whole pass.

    Attributes:
        left: batches that are left.
    """

    def __init__(self, passes: Passes, number: int, first: int, *, steps: int) -> None:
        self._of = passes
        self._number = number
        self._steps = steps
        self.left = steps - first

    @property
    def element_spec(self) -> Any:
        """Of a batch."""
        return self._of.element_spec

    @property
    def buffered(self) -> bool:
        """Whether its batches come in buffers."""
        return self._of.buffered

    def tensors(self) -> tuple[Any, BatchBuffer | None]:
        """TensorFlow's iterator and the buffer before it; the caller tells `note` what it has read of
        both."""
        iterator = self._of.at((self._number, self._steps - self.left))
        return iterator, self._of.buffer

    def note(self, batches: int, buffer: BatchBuffer | None = None) -> None:
        """Notes that so many batches were read, and the buffer that is left."""
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
    """Batches of one pass, read together.

    Attributes:
        batches: a nest of tensors of shape (batches, ...).
        next: the number of the next one, an int32 scalar.
    """

    batches: Any
    next: Any

    @classmethod
    def empty(cls, spec: Any) -> BatchBuffer:
        """A buffer without batches, for elements of a spec."""
        return cls.of(tf.nest.map_structure(_none_of, spec))

    @classmethod
    def of(cls, element: Any) -> BatchBuffer:
        """All batches of an element."""
        return cls(element, tf.constant(0))

    @staticmethod
    def spec(spec: Any) -> BatchBuffer:
        """The specs of a buffer of elements of a spec."""
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
