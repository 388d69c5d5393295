"""Corrects two writes to variables: Keras' `assign_add`, and TensorFlow's to an integer that replicas sum.

Keras writes `assign(self + value)`: in a variable that replicas sum, this sums the old value too, and with
concurrent writers it loses updates. TensorFlow divides a written sum equally among the replicas, even an
integer that the number of replicas does not divide. All other writes are left to Keras and TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.stand_in import StandIn
from dtrain.keras_engine.context import underlying, updating_locally
from dtrain.keras_engine.protocol import ReplicaLayout, is_asynchronous, layout_of
from dtrain.upstream import keras_names, tensorflow_names
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


@replaces(tensorflow_names.WRITE_SUMMED)
def write_summed(original: Callable[..., Any], var: Any, value: Any, read_value: bool = True) -> Any:
    """The replacement of the function that writes a whole value to a variable that replicas sum."""
    layout = _layout_of_integers(var)
    if layout is None:
        return original(var, value, read_value)
    written = _write_parts(var, value, layout)
    if not read_value:
        return written
    with tf.control_dependencies([] if written is None else [written]):
        return var.read_value()


@replaces(tensorflow_names.RESTORE_SUMMED)
def restore_summed(original: Callable[..., Any], var: Any, tensor: Any, aggregation: Any) -> Any:
    """The replacement for the same write of a value that is restored from a TensorFlow checkpoint."""
    layout = _layout_of_integers(var)
    return original(var, tensor, aggregation) if layout is None else _write_parts(var, tensor, layout)


def _layout_of_integers(variable: Any) -> ReplicaLayout | None:
    """The layout of the variable's strategy, if it is dtrain's and the replicas sum an integer; else None."""
    summed = variable.dtype.is_integer and variable.aggregation == tf.VariableAggregation.SUM
    return layout_of(variable.distribute_strategy) if summed else None


def _write_parts(variable: Any, whole: Any, layout: ReplicaLayout) -> Any:
    """Gives each replica an equal part of an integer; the first replica of the job gets the remainder too."""
    whole = tf.cast(whole, variable.dtype)
    part = whole // layout.replicas
    first = whole - part * (layout.replicas - 1)
    replicas = enumerate(variable.values, layout.first_replica)
    return tf.group([copy.assign(first if number == 0 else part) for number, copy in replicas])


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
