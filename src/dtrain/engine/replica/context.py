"""Where code runs, as thread-local values, and the ways in which replicas combine their values.

No model code belongs here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import tensorflow as tf

from dtrain.engine.replica.replica_reductions import all_reduced, gathered_rows
from dtrain.interfaces.managed_strategy import current_layout
from dtrain.upstream import layer_calls

Value = TypeVar("Value")


class ThreadValue(Generic[Value]):
    """A thread-local value; calling the object returns it.

    Args:
        default: the value outside of `set`.
    """

    def __init__(self, default: Value) -> None:
        self._default = default
        self._local = threading.local()

    def __call__(self) -> Value:
        """The value in this thread."""
        found: Value = getattr(self._local, "value", self._default)
        return found

    @contextlib.contextmanager
    def set(self, value: Value) -> Iterator[Value]:
        """A context in which this thread has another value; at its end, the previous value is restored."""
        outer = self()
        self._local.value = value
        try:
            yield value
        finally:
            self._local.value = outer


def all_reduce_sum(values: Any) -> Any:
    """All-reduces a nest of tensors and `tf.IndexedSlices` to their sums over all replicas.

    All tensors of one dtype go into one all-reduce. Must be called in a replica.

    Raises:
        CompilationError: inside a function that XLA compiles.
        RuntimeError: inside a nested tf.function, `cond` or loop, where TensorFlow cannot combine replicas.
    """
    return all_reduced(values)


def gather_examples(value: Any) -> Any:
    """Concatenates the rows of all replicas, in the replicas' order.

    Gradients flow to this replica's own rows only. Must be called in a replica.

    Args:
        value: a tensor, ragged or sparse tensor of shape (own examples, ...), or None.

    Returns:
        The same kind of tensor, of shape (all examples, ...); None for None.

    Raises:
        CompilationError: inside a function that XLA compiles.
    """
    return None if value is None else gathered_rows(value)


def gathered(leaf: Any) -> Any:
    """The rows of a tensor on all replicas, concatenated, and its Keras mask likewise."""
    found = gather_examples(leaf)
    mask = None if leaf is None else layer_calls.mask_of(leaf)
    if mask is not None and found is not leaf:
        layer_calls.set_mask(found, tf.cast(gather_examples(tf.cast(mask, tf.int32)), tf.bool))
    return found


single_program = ThreadValue(False)
"""Whether the code is traced as the program of one device, which is partitioned afterwards."""

updating_locally = ThreadValue(False)
"""Whether the code runs after the all-reduce, where each replica acts like a single device."""


def in_replica() -> bool:
    """Whether the code runs in a replica of dtrain's that has others, and does not act alone."""
    if current_layout() is None or updating_locally():
        return False
    return tf.distribute.get_replica_context() is not None


def local_update() -> contextlib.AbstractContextManager[bool]:
    """Marks code that must not communicate with other replicas, because each of them does the same."""
    return updating_locally.set(True)


Apply = Callable[..., Any]
"""Keras' own `optimizer.apply`."""


class TracedBlock(Protocol):
    """What a thread traces for parameter servers: a block of steps, or a step to plan one.

    Attributes:
        mixed_into_seeds: an int64 scalar that is mixed into the seeds of random layers; None to leave them.
    """

    @property
    def mixed_into_seeds(self) -> tf.Tensor | None:  # noqa: D102
        ...

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in a step; `original` is Keras' own `apply`."""


current_block: ThreadValue[TracedBlock | None] = ThreadValue(None)
"""The block whose train step this thread is tracing, or the planner of its step; None if there is none."""

block_workers = ThreadValue(0)
"""The workers that run the block, of any kind, which this thread is tracing; 0 outside of a block."""


_reported: ThreadValue[int | None] = ThreadValue(None)


def reporting_one_replica() -> contextlib.AbstractContextManager[int | None]:
    """Within it, `num_replicas_in_sync` gives 1."""
    return _reported.set(1)


def reported_replicas(number: int) -> int:
    """What `num_replicas_in_sync` gives: 1 in a single program. `number` is the true number of replicas."""
    return 1 if single_program() else _reported() or number
