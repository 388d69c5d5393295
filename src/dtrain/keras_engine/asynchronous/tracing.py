"""Tells `optimizer.apply` and random layers which block of steps this thread is tracing.

It only stores the block; blocks are traced in `program` and `rehearsal`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from dtrain.keras_engine.thread_value import ThreadValue

Apply = Callable[..., Any]


class TracedBlock(Protocol):
    """What a thread can trace: a block, or its rehearsal.

    Attributes:
        mixed_into_seeds: an int64 scalar that is mixed into the seeds of random layers; None to leave them.
    """

    @property
    def mixed_into_seeds(self) -> tf.Tensor | None:  # noqa: D102
        ...

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in a step; `original` is Keras' own `apply`."""


_block: ThreadValue[TracedBlock | None] = ThreadValue(None)


def current_block() -> TracedBlock | None:
    """The block, or rehearsal, that this thread is tracing; None if there is none."""
    return _block()


def tracing(block: TracedBlock) -> contextlib.AbstractContextManager[Any]:
    """Makes `optimizer.apply` call `block.apply` inside the context."""
    return _block.set(block)
