"""Batches that were read together, of which the graph of the steps takes one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


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
