"""The outermost layer that a replica calls in a loop of the user's own.

- CPU kernels fail on tensors without rows: convolutions give wrong shapes, the gradient of a pooling ends the
  process, and a maximum has no values. So a replica without examples gives its outermost layer one row of
  zeros, and the outputs lose the row that belongs to it: losses and metrics see no examples. Programs of XLA,
  which has kernels of its own, are left alone.
- Non-trainable state of layers, such as moving statistics, is written by each replica to its own copy. After
  the layer, one all-reduce replaces the copies by their mean, weighted by the replicas' shares of the
  examples. Integers (seeds, counters) are left alone, because they advance equally on all replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import is_dense, row_count, with_zero_row, without_zero_row
from dtrain.engine.replica.context import all_reduce_sum, in_replica, local_update
from dtrain.engine.replica.replica_reductions import check_not_compiled
from dtrain.engine.replica.replica_threads import share_build, watch
from dtrain.engine.replica.replica_writes import holds_parts, writing
from dtrain.engine.replica.thread_state import thread_state
from dtrain.upstream import (
    keras_models,
    keras_names,
    tensorflow_names,
    tf_replicas,
    tf_tracing,
)
from dtrain.upstream.reach import set_methods
from dtrain.upstream.tf_variables import underlying


def layer_call(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The replacement of `Layer.__call__`. It changes the outermost layer that a replica calls."""
    share_build(self)
    if keras_models.remat_mode_of(self) is not None:
        set_methods(self, keras_names.REMATERIALIZED_CALL)
    if thread_state.inside_layer or not in_replica():
        return original(self, *args, **kwargs)
    watch(self)
    set_methods(tf.distribute.get_replica_context(), tensorflow_names.ALL_REDUCE)
    rows = _rows_of_first((args, kwargs))
    with averaged(self, rows):
        return _with_rows(original, self, rows, args, kwargs)


def _with_rows(original: Callable[..., Any], self: Any, rows: Any, args: Any, kwargs: Any) -> Any:
    """Calls the outermost layer, with a row of zeros if the replica has no examples."""
    # XLA has kernels of its own, and knows all shapes while it compiles.
    known = None if rows is None else tf.get_static_value(rows)
    if rows is None or tf_tracing.in_xla_graph() or (known is not None and int(known) > 0):
        with thread_state.having(inside_layer=True):
            return original(self, *args, **kwargs)
    empty = tf.equal(rows, 0)
    args, kwargs = keras.tree.map_structure(lambda leaf: with_zero_row(leaf, empty), (args, kwargs))
    with thread_state.having(inside_layer=True, layer_is_empty=empty), _uncounted(self, empty):
        outputs = original(self, *args, **kwargs)
    return keras.tree.map_structure(lambda leaf: without_zero_row(leaf, empty), outputs)


def all_reduce(
    original: Callable[..., Any], self: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """The `all_reduce` of a replica's context; inside a layer, the row of zeros adds nothing to a sum.

    So the moments of a synchronized BatchNormalization count examples only.

    Raises:
        CompilationError: inside a layer that XLA compiles, where replicas cannot communicate.
    """
    if thread_state.inside_layer:
        check_not_compiled()
    empty = thread_state.layer_is_empty
    if empty is not None and reduce_op in (tf.distribute.ReduceOp.SUM, "sum", "SUM"):
        value = tf.nest.map_structure(lambda part: tf.where(empty, tf.zeros_like(part), part), value)
    return original(self, reduce_op, value, options)


def without_row(leaf: Any) -> Any:
    """A tensor that a layer computed, without the row that belongs to the row of zeros, if there is one."""
    empty = thread_state.layer_is_empty
    return leaf if empty is None else without_zero_row(leaf, empty)


@contextlib.contextmanager
def _uncounted(layer: Any, empty: Any) -> Iterator[None]:
    """Within it, the metrics that layers hold and update do not count the row of zeros."""
    # `Model.metrics` would add the compiled metrics, which are updated outside of the layer.
    variables = [v for metric in keras.layers.Layer.metrics.fget(layer) for v in metric.variables]
    before = [tf.identity(v.value) for v in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        if not holds_parts(variable):
            continue  # the metric was updated with the examples of all replicas
        variable.assign(tf.where(empty, value, variable.value))


def _rows_of_first(nest: Any) -> Any:
    """The number of rows of the first tensor that has rows, an int64 scalar; None if no tensor has any."""
    tensors = (leaf for leaf in keras.tree.flatten(nest) if isinstance(leaf, tf.Tensor) or not is_dense(leaf))
    return next((rows for rows in map(row_count, tensors) if rows is not None), None)


@contextlib.contextmanager
def averaged(layer: Any, rows: tf.Tensor | None) -> Iterator[None]:
    """In a replica of a loop of the user's own: averages the state that the layer writes inside the context.

    A synchronized BatchNormalization writes the same on all replicas, so its state is left alone.

    Args:
        layer: the outermost layer that the replica calls.
        rows: the number of examples that the layer is given, an int64 scalar; None if it is unknown, and all
            replicas count alike.
    """
    with writing() as ids:
        yield
    if not ids:
        return
    alike = {
        id(v)
        for sublayer in keras_models.layers_of(layer)
        if _is_synchronized(sublayer)
        for v in sublayer.variables
    }
    variables = [underlying(v) for v in layer.non_trainable_variables if id(v) not in alike]
    written = [v for v in variables if id(v) in ids and v.dtype.is_floating]
    if not written:
        return
    if tf_tracing.in_xla_graph() or not tf_replicas.merge_possible():
        _warn_of(layer.name)
        return
    weight = tf.ones([], tf.float32) if rows is None else tf.cast(rows, tf.float32)
    values = [_at_least_float32(v.read_value()) for v in written]
    parts = [tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype)) for value in values]
    total, sums = all_reduce_sum((weight, parts))
    with local_update():
        for variable, own, value in zip(written, values, sums, strict=True):
            mean = tf.where(total > 0, value / tf.cast(total, value.dtype), own)
            variable.assign(tf.cast(mean, variable.dtype))


def _is_synchronized(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and bool(layer.synchronized)


@functools.cache  # once for each layer
def _warn_of(name: str) -> None:
    logger.warning(
        "The replicas' moving statistics of %r are not averaged, because it is called inside a condition, "
        "a loop or a function with jit_compile=True: the statistics that are saved are those of one "
        "replica's examples. Hint: call the layer in the replica's function itself.",
        name,
    )


def _at_least_float32(value: Any) -> Any:
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value
