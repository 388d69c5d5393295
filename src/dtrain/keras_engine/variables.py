"""Keeps what replicas write to variables right: the writes themselves, and the state of layers.

Keras writes `assign_add` as `assign(self + value)`: in a variable that replicas sum, this sums the old value
too, and with concurrent writers it loses updates. So the write is corrected.

Non-trainable state of layers, such as moving statistics, is written by each replica to its own copy. At the
end of a step of `fit`, and in a loop of the user's own after the outermost layer, one all-reduce replaces the
copies by their mean, weighted by the replicas' shares of the examples. Integers (seeds, counters) are left
alone, because they advance equally on all replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.asynchronous.stand_in import StandIn
from dtrain.keras_engine.context import (
    ReplicaStep,
    ThreadValue,
    all_reduce_sum,
    current_step,
    local_update,
    underlying,
    updating_locally,
)
from dtrain.keras_engine.protocol import is_asynchronous, layout_of
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import keras_names
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.keras import in_stateless_scope, value_of
from dtrain.upstream.reach import replaces


@replaces(keras_names.VARIABLE_ASSIGN_ADD, keras_names.VARIABLE_ASSIGN_SUB)
def assign_change(original: Callable[..., Any], self: Any, value: Any) -> Any:
    """The replacement of `assign_add` and `assign_sub`."""
    variable: Any = value_of(self)
    shared = isinstance(variable, StandIn) or _shared_by_workers(variable)
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
    if layout_of(strategy) is None or updating_locally():
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


_written: ThreadValue[set[int] | None] = ThreadValue(None)


def writing() -> contextlib.AbstractContextManager[set[int] | None]:
    """A context that collects the ids of the variables that `note_write` notes outside of a step of `fit`."""
    return _written.set(set())


def note_write(variable: Any) -> None:
    """Notes that this replica writes a variable of which each replica has a copy; not in an update."""
    step, written = current_step(), _written()
    if step is not None:
        step.note_write(variable)
    elif written is not None and not updating_locally():
        written.add(id(variable))


def synchronise(step: ReplicaStep) -> None:
    """Replaces every float variable that the step wrote with its mean over the replicas.

    Must be called in a replica, outside of XLA.
    """
    written = [v for v in step.assigned.values() if v.dtype.is_floating]
    if not written:
        return
    means = step.mean([_at_least_float32(v.read_value()) for v in written])
    with local_update():
        for variable, mean in zip(written, means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))


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
        id(v) for each in upstream_keras.layers_of(layer) if _is_synchronized(each) for v in each.variables
    }
    variables = [underlying(v) for v in layer.non_trainable_variables if id(v) not in alike]
    written = [v for v in variables if id(v) in ids and v.dtype.is_floating]
    if not written:
        return
    if upstream_tf.in_xla_graph() or not upstream_tf.merge_possible():
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
