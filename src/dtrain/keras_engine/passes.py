"""Passes over data that can be begun anywhere, one after the other from one iterator of TensorFlow's.

To make an iterator takes longer than many a step, and what reads ahead in it stops where it ends. So there is
one for as long as passes are read in order, which is what most training does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf


class Begun(Protocol):
    """A source of batches that says where its next pass begins.

    Attributes:
        place: the number of the pass, and of its first batch.
        steps: batches in a pass.
    """

    place: tuple[int, int]

    @property
    def steps(self) -> int: ...  # noqa: D102

    def set_place(self, number: int, first: int) -> None:
        """Has the next iterator begin there."""


class Passes:
    """Pass after pass.

    Args:
        source: where a pass begins.
        make: makes a dataset without end: what an iterator gives that is made after `source.set_place`.
        each: batches in one element; the last of a pass may have fewer.
        alike: whether all passes are the same, so that any may follow on any.
        stacked: whether an element is a stack of batches of one pass, each leaf of shape (batches, ...), that
            are to be given one by one. To take one off a stack costs a fraction of what reading it would.

    Attributes:
        each, stacked: as given.
        stack: of the batches that were read and are still to come, where they are stacked.
    """

    def __init__(
        self,
        source: Begun,
        make: Callable[[], tf.data.Dataset],
        *,
        each: int = 1,
        alike: bool = False,
        stacked: bool = False,
    ) -> None:
        self.each = each
        self.stacked = stacked
        self.stack: Stack | None = None
        self._source = source
        self._make = make
        self._alike = alike
        self._iterator: Any = None
        self._stands: tuple[int, int] | None = None  # the next batch of the iterator, or of the stack

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        """Made when something is read: making it takes longer than reading a little."""
        return self._make()

    @property
    def element_spec(self) -> Any:
        """Of what is given."""
        spec = self._dataset.element_spec
        return tf.nest.map_structure(_of_one, spec) if self.stacked else spec

    def __iter__(self) -> Pass:
        return Pass(self, *self._source.place, steps=self._source.steps)

    def at(self, place: tuple[int, int]) -> Any:
        """TensorFlow's iterator, which gives the batch of a place next; where it stands then is not known.

        Where batches are stacked, `stack` gives them before it.
        """
        first = 1 if self._alike else 0  # what counts of a place
        if self._stands is None or self._stands[first:] != place[first:]:
            self._source.set_place(*place)
            self._iterator = iter(self._dataset)
            self.stack = Stack.empty(self._dataset.element_spec) if self.stacked else None
        self._stands = None
        return self._iterator

    def left_at(self, place: tuple[int, int]) -> None:
        """Notes how far the iterator was read."""
        self._stands = place


class Pass:
    """One pass from a place on, to iterate over.

    Args:
        passes: that it is one of.
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
        """Of what it gives."""
        return self._of.element_spec

    @property
    def stacked(self) -> bool:
        """Whether its batches come by stacks."""
        return self._of.stacked

    def tensors(self) -> tuple[Any, Stack | None]:
        """TensorFlow's iterator and what stands before it; `note` must be told what was read of both."""
        iterator = self._of.at((self._number, self._steps - self.left))
        return iterator, self._of.stack

    def note(self, batches: int, stack: Stack | None = None) -> None:
        """Takes note that so many batches were read, and of the stack that is left."""
        self._of.stack = stack
        self.left -= batches
        next_one = (self._number, self._steps - self.left) if self.left else (self._number + 1, 0)
        self._of.left_at(next_one)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        iterator, stack = self.tensors()
        if stack is None:
            element = next(iterator)
        else:
            if not stack.left():
                stack = Stack.of(next(iterator))
            element, stack = stack.popped()
        self.note(min(self._of.each, self.left), stack)
        return element


class Stack(NamedTuple):
    """Batches of one pass, read together.

    Attributes:
        batches: a nest of tensors of shape (batches, ...).
        next: the number of the first that is still to come, an int32 scalar.
    """

    batches: Any
    next: Any

    @classmethod
    def empty(cls, spec: Any) -> Stack:
        """One with nothing in it, for elements of a spec."""
        return cls.of(tf.nest.map_structure(_none_of, spec))

    @classmethod
    def of(cls, element: Any) -> Stack:
        """All batches of an element."""
        return cls(element, tf.constant(0))

    @staticmethod
    def spec(spec: Any) -> Stack:
        """The specs of a stack of elements of a spec."""
        return Stack(spec, tf.TensorSpec([], tf.int32))

    def left(self) -> Any:
        """Whether there is one to come, a bool scalar."""
        leaf = tf.nest.flatten(self.batches)[0]
        return self.next < (tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0])

    def popped(self) -> tuple[Any, Stack]:
        """The next batch, and the stack without it."""
        batch = tf.nest.map_structure(lambda leaf: tf.gather(leaf, self.next), self.batches)
        return batch, Stack(self.batches, self.next + 1)


def _of_one(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _none_of(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)
