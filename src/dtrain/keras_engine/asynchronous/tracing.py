"""Which block of steps is being traced in this thread: `optimizer.apply` and random layers ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from dtrain.keras_engine.thread_value import ThreadValue

Apply = Callable[..., Any]


class TracedBlock(Protocol):
    """A block, or the rehearsal of one.

    Attributes:
        mixed_into_seeds: makes what its random layers draw different; None where nothing is mixed in.
    """

    @property
    def mixed_into_seeds(self) -> tf.Tensor | None:  # noqa: D102
        ...

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """What `optimizer.apply` does in a step; `original` is Keras' own."""


_block: ThreadValue[TracedBlock | None] = ThreadValue(None)


def current_block() -> TracedBlock | None:
    """The block, or the rehearsal of one, that is being traced in this thread."""
    return _block()


def tracing(block: TracedBlock) -> contextlib.AbstractContextManager[Any]:
    """Makes `optimizer.apply` go through a block."""
    return _block.set(block)
