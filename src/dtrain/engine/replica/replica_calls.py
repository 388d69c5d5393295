"""Intercepts a replica's calls of layers and `tf.function`s, its writes, and its waits for other replicas.

- Replicas of a process run in threads that take turns with the same objects, so each has its own Python
  attributes of them (`replica_attributes.py`).
- CPU kernels fail on tensors without rows: convolutions give wrong shapes, the gradient of a pooling ends the
  process, and a maximum has no values. So a replica without examples gives its outermost layer one row of
  zeros, and the outputs lose the row that belongs to it: losses and metrics see no examples. Programs of XLA,
  which has kernels of its own, are left alone.
- A user's `tf.function` is inlined into the step that calls it. Replicas cannot communicate inside a nested
  function, and the step does not see what it looks up, writes or builds. Under parameter servers, such a
  function would keep variables of one block, which later blocks lack.
- Keras writes `assign_add` as `assign(self + value)`: in a variable that replicas sum, this sums the old
  value too, and with concurrent writers it loses updates. So the write is corrected.
- Non-trainable state of layers, such as moving statistics, is written by each replica to its own copy. At the
  end of a step of `fit`, and in a loop of the user's own after the outermost layer, one all-reduce replaces
  the copies by their mean, weighted by the replicas' shares of the examples. Integers (seeds, counters) are
  left alone, because they advance equally on all replicas.
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
from dtrain.engine.replica.replica_attributes import PerReplicaAttributes, PerReplicaObjects
from dtrain.engine.replica.replica_reductions import check_not_compiled
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables.local_variable import LocalVariable
from dtrain.interfaces.managed_strategy import is_asynchronous, layout_of
from dtrain.upstream import (
    graph_functions,
    keras_models,
    keras_names,
    tensorflow_names,
    tf_replicas,
    tf_tracing,
)
from dtrain.upstream.keras_variables import in_stateless_scope, value_of
from dtrain.upstream.reach import set_methods
from dtrain.upstream.tf_variables import underlying


def with_own_attributes(fn: Callable[..., Any], local_replicas: int) -> Callable[..., Any]:
    """A function that calls `fn` in a replica's thread, with attributes of the replica's own.

    Args:
        fn: a replica's function, as TensorFlow would call it; AutoGraph does not convert it again.
        local_replicas: the number of replicas of this process.
    """
    members = PerReplicaObjects()
    members.add(fn)

    def one_replica(*args: Any, **kwargs: Any) -> Any:
        set_methods(tf.distribute.get_replica_context(), tensorflow_names.MERGE_CALL)
        own = PerReplicaAttributes(members)
        with thread_state.having(own_attributes=own):
            own.begin_turn()
            found = fn(*args, **kwargs)
        # The last replica's attributes stay on the objects, as the last call's do on one device.
        if tf_replicas.local_replica_index() < local_replicas - 1:
            own.end_turn()
        return found

    graph_functions.mark_converted(one_replica)
    return one_replica


def merge_call(original: Callable[..., Any], self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    """The `merge_call` of a replica's context, where a replica's thread waits for the others."""
    own = thread_state.own_attributes
    if own is None:
        return original(self, fn, args, kwargs)
    own.end_turn()
    found = original(self, fn, args, kwargs)
    own.begin_turn()
    return found


def share_build(layer: Any) -> None:
    """Makes the attributes that a layer is given while it is built those of all replicas."""
    if thread_state.own_attributes is not None and not layer.built:
        set_methods(layer, keras_names.MAYBE_BUILD)


def maybe_build(original: Callable[..., Any], self: Any, call_spec: Any) -> Any:
    """A layer's method that builds it at its first call."""
    own = None if self.built else thread_state.own_attributes
    found = original(self, call_spec)
    if own is not None:
        own.share(self)
    return found


def watch(root: Any) -> None:
    """From here on, gives this replica its own attributes of an object and of all reachable from it."""
    own = thread_state.own_attributes
    if own is not None:
        own.watch(root)


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
        found = original(self, *args, **kwargs)
    return keras.tree.map_structure(lambda leaf: without_zero_row(leaf, empty), found)


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
    tensors = (each for each in keras.tree.flatten(nest) if isinstance(each, tf.Tensor) or not is_dense(each))
    return next((rows for rows in map(row_count, tensors) if rows is not None), None)


def function_call(original: Callable[..., Any], self: Any, /, *args: Any, **kwds: Any) -> Any:
    """The replacement of `tf.function`'s `__call__`."""
    block = thread_state.block_workers > 0
    if tf.executing_eagerly() or not (block or _in_any_replica()):
        return original(self, *args, **kwds)
    if not graph_functions.compiled_by_xla(self):
        return graph_functions.call_inline(self, original, args, kwds)
    # XLA compiles whole functions. A block traces the function again: an earlier block's variables are gone.
    return original(graph_functions.same_function_untraced(self) if block else self, *args, **kwds)


def _in_any_replica() -> bool:
    """Whether the code runs in a replica context under a strategy of dtrain's."""
    if not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None:
        return False
    return layout_of(tf.distribute.get_strategy()) is not None


def assign_change(original: Callable[..., Any], self: Any, value: Any) -> Any:
    """The replacement of `assign_add` and `assign_sub`."""
    variable: Any = value_of(self)
    shared = isinstance(variable, LocalVariable) or _shared_by_workers(variable)
    if in_stateless_scope() or not (shared or _written_in_step(variable)):
        return original(self, value)
    value = tf.cast(value, variable.dtype)
    if not shared and not value.shape.is_compatible_with(variable.shape):
        return original(self, value)
    getattr(variable, original.__name__)(value)
    return self.value


def _shared_by_workers(variable: Any) -> bool:
    """Whether workers of a parameter-server strategy may write to a variable at the same time."""
    if "/job:ps/" in getattr(variable, "device", ""):
        return True
    return is_asynchronous(getattr(variable, "_distribute_strategy", None))


def _written_in_step(variable: Any) -> bool:
    """Whether a replica of the variable's strategy, one of dtrain's, writes to it outside of the update."""
    strategy = getattr(variable, "distribute_strategy", None)
    if layout_of(strategy) is None or thread_state.updating_locally:
        return False
    return tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context() is not None


def combined_on_read(variable: Any) -> Any:
    """The TensorFlow variable, if each replica writes its own copy and a read combines them; else None."""
    found = underlying(variable)
    if not isinstance(found, tf.distribute.DistributedValues):
        return None
    return found if found.synchronization == tf.VariableSynchronization.ON_READ else None


def holds_parts(variable: Any) -> bool:
    """Whether each replica holds a part of a variable, so that its value is the sum of the parts."""
    found = combined_on_read(variable)
    return found is not None and bool(found.aggregation == tf.VariableAggregation.SUM)


@contextlib.contextmanager
def writing() -> Iterator[set[int]]:
    """A context that collects the ids of the variables that `note_write` notes outside of a step of `fit`."""
    ids: set[int] = set()
    with thread_state.having(written=ids):
        yield ids


def note_write(variable: Any) -> None:
    """Notes that this replica writes a variable of which each replica has a copy; not in an update."""
    written = thread_state.written
    if written is not None and not thread_state.updating_locally:
        written.add(id(variable))


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
        id(v) for each in keras_models.layers_of(layer) if _is_synchronized(each) for v in each.variables
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
