"""Where code runs, and the ways in which replicas combine their values.

No model code belongs here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.replica_reductions import all_reduced, gathered_rows
from dtrain.engine.replica.thread_state import thread_state
from dtrain.interfaces.managed_strategy import current_layout
from dtrain.upstream import layer_calls


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
    rows = gather_examples(leaf)
    mask = None if leaf is None else layer_calls.mask_of(leaf)
    if mask is not None and rows is not leaf:
        layer_calls.set_mask(rows, tf.cast(gather_examples(tf.cast(mask, tf.int32)), tf.bool))
    return rows


def in_replica() -> bool:
    """Whether the code runs in a replica of dtrain's that has others, and does not act alone."""
    if current_layout() is None or thread_state.updating_locally:
        return False
    return tf.distribute.get_replica_context() is not None


def local_update() -> contextlib.AbstractContextManager[None]:
    """Marks code that must not communicate with other replicas, because each of them does the same."""
    return thread_state.having(updating_locally=True)


def reporting_one_replica() -> contextlib.AbstractContextManager[None]:
    """Within it, `num_replicas_in_sync` gives 1."""
    return thread_state.having(reports_one_replica=True)


def reported_replicas(number: int) -> int:
    """What `num_replicas_in_sync` gives: 1 in a single program. `number` is the true number of replicas."""
    return 1 if thread_state.single_program or thread_state.reports_one_replica else number
