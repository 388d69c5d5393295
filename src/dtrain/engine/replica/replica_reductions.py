"""Combines values of replicas by TensorFlow's collectives.

Which values are combined is not decided here, but in `context.py` and `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.errors import CompilationError
from dtrain.interfaces.managed_strategy import layout_of, managed
from dtrain.upstream import servers, tf_tracing


def check_not_compiled() -> None:
    """Must be called before replicas communicate, which they cannot do in a function that XLA compiles.

    Raises:
        CompilationError: this code is in such a function; the hint says what to compile instead.
    """
    if tf_tracing.in_xla_graph():
        raise CompilationError(
            "A function with jit_compile=True needs what the other replicas have: gradients that "
            "optimizer.apply reduces, a loss over the whole batch or synchronized moments. XLA cannot "
            "compile communication between replicas.",
            hint=(
                "let the function with jit_compile=True only compute the loss and its gradients, and call "
                "optimizer.apply_gradients outside of it, still inside strategy.run"
            ),
        )


def as_floats(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function of floats to a tensor of numbers; integers are rounded back to their own dtype."""
    if value.dtype.is_floating:
        return function(value)
    return tf.cast(tf.round(function(tf.cast(value, tf.float64))), value.dtype)


def all_reduced(values: Any) -> Any:
    """The sums over all replicas of a nest of tensors and `tf.IndexedSlices`, the same on every replica.

    All tensors of one dtype go into one all-reduce, or into those of the strategy's `reduction_groups`. Must
    be called in a replica.

    Args:
        values: this replica's values.

    Raises:
        CompilationError: inside a function that XLA compiles.
        RuntimeError: inside a nested tf.function, `cond` or loop, where TensorFlow cannot combine replicas.
    """
    check_not_compiled()
    # TensorFlow reduces on the device of the values, and a plain read of a variable names no device.
    flat = [tf.identity(value) for value in tf.nest.flatten(values)]
    if not flat:
        return values
    context = tf.distribute.get_replica_context()
    reduced: dict[int, Any] = {}
    kinds = [(type(value), value.dtype) for value in flat]
    for kind in dict.fromkeys(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        sparse = issubclass(kind[0], tf.IndexedSlices)
        # MirroredStrategy would reduce tensors of int32 one at a time.
        narrow = kind[1] == tf.int32 and not sparse
        given = [tf.cast(flat[i], tf.int64) if narrow else flat[i] for i in alike]
        # TensorFlow returns no sum of a call before it has all of them: a weight whose gradient is in an
        # early group is updated while later groups are still sent.
        for group in [range(len(given))] if sparse else managed(context.strategy).reduction_groups(given):
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, [given[i] for i in group])
            totals = [tf.cast(total, tf.int32) for total in totals] if narrow else totals
            reduced.update(zip((alike[i] for i in group), totals, strict=True))
    return tf.nest.pack_sequence_as(values, [reduced[i] for i in range(len(flat))])


def gathered_rows(value: Any) -> Any:
    """Concatenates the rows of all replicas, in the replicas' order; gradients flow to the own rows only.

    Args:
        value: a dense, ragged or sparse tensor of shape (own examples, ...).

    Raises:
        CompilationError: inside a function that XLA compiles.
    """
    if isinstance(value, tf.RaggedTensor):
        lengths = gathered_rows(value.row_lengths())
        return tf.RaggedTensor.from_row_lengths(gathered_rows(value.values), lengths, validate=False)
    if isinstance(value, tf.SparseTensor):
        return _gather_sparse(value)
    check_not_compiled()
    context = tf.distribute.get_replica_context()
    value = tf.convert_to_tensor(value)
    rows = tf.shape(value)[0]
    counts = context.all_gather(tf.reshape(rows, [1]), axis=0)
    everyone = tf.stop_gradient(context.all_gather(tf.stop_gradient(value), axis=0))
    start = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
    joined = tf.concat([everyone[:start], value, everyone[start + rows :]], axis=0)
    joined.set_shape(tf.TensorShape([None]).concatenate(value.shape[1:]))
    return joined


def _gather_sparse(value: tf.SparseTensor) -> tf.SparseTensor:
    """As `gathered_rows`, for a sparse tensor."""
    counts = gathered_rows(tf.reshape(value.dense_shape[0], [1]))
    before = tf.reduce_sum(counts[: tf.distribute.get_replica_context().replica_id_in_sync_group])
    indices = value.indices + tf.pad(tf.reshape(before, [1, 1]), [[0, 0], [0, value.shape.rank - 1]])
    shape = tf.concat([[tf.reduce_sum(counts)], value.dense_shape[1:]], axis=0)
    whole = tf.SparseTensor(gathered_rows(indices), gathered_rows(value.values), shape)
    whole.set_shape([None, *value.shape[1:]])
    return whole


def all_reduce_per_replica_values(
    original: Callable[..., Any], self: Any, reduce_op: Any, per_replica_values: Any, options: Any
) -> Any:
    """The method by which collective operations all-reduce several values of all replicas."""
    if not tf.executing_eagerly():
        return original(self, reduce_op, per_replica_values, options)
    return servers.eager_all_reduce(self, reduce_op, per_replica_values, options)


def unmeasured_parts(model: Any, *, reading: bool) -> list[str]:
    """The parts of the time (`events.PARTS`) of training steps that were not measured and count as computing.

    Clocks are not deterministic, so a graph cannot read them with deterministic operations. A transport that
    measures the waiting itself does not need them.

    Args:
        model: the model in training.
        reading: whether the time of reading the batches was measured.
    """
    unmeasured = [] if reading else ["input"]
    if tf_tracing.deterministic_operations():
        strategy = model.distribute_strategy
        layout = layout_of(strategy)
        several = managed(strategy).asynchronous is not None or (layout is not None and layout.workers > 1)
        if several and managed(strategy).waited is None:
            unmeasured.append("communication")
    return unmeasured
