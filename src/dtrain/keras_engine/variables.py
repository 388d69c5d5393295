"""Writes to variables that would lose numbers: Keras' `assign_add`, and TensorFlow's to a sum of integers.

Keras writes `assign(self + value)`: under an aggregation that sums the old value over the replicas too,
and under concurrent writers it loses updates. TensorFlow cuts a sum into equal parts, also where that is
no whole number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.stand_in import StandIn
from dtrain.keras_engine.context import underlying, updating_locally
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of, servers_of
from dtrain.upstream.keras import in_stateless_scope, value_of


def make_assign_change(original: Callable[..., Any], method: str) -> Callable[..., Any]:
    """The replacement of `assign_add` or `assign_sub` (`method`)."""

    def change(self: Any, value: Any) -> Any:
        variable: Any = value_of(self)
        if isinstance(variable, StandIn) or _shared_by_workers(variable):
            if in_stateless_scope():
                return original(self, value)
            getattr(variable, method)(tf.cast(value, variable.dtype))
            return self.value
        strategy = getattr(variable, "distribute_strategy", None)
        if layout_of(strategy) is None or updating_locally() or not _in_replica_of(strategy):
            return original(self, value)
        if in_stateless_scope():
            return original(self, value)
        value = tf.cast(value, variable.dtype)
        if not value.shape.is_compatible_with(variable.shape):
            return original(self, value)
        getattr(variable, method)(value)
        return self.value

    return change


def make_write_summed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of what writes a whole value to a variable that is summed over the replicas."""

    def on_read_assign_cross_replica(var: Any, value: Any, read_value: bool = True) -> Any:
        layout = _layout_of_integers(var)
        if layout is None:
            return original(var, value, read_value)
        written = _write_parts(var, value, layout)
        if not read_value:
            return written
        with tf.control_dependencies([] if written is None else [written]):
            return var.read_value()

    return on_read_assign_cross_replica


def make_restore_summed(original: Callable[..., Any]) -> Callable[..., Any]:
    """As `make_write_summed`, for a value that is read from a checkpoint of TensorFlow's."""

    def get_on_read_restore_ops(var: Any, tensor: Any, aggregation: Any) -> Any:
        layout = _layout_of_integers(var)
        return original(var, tensor, aggregation) if layout is None else _write_parts(var, tensor, layout)

    return get_on_read_restore_ops


def _layout_of_integers(variable: Any) -> ReplicaLayout | None:
    """The layout of the strategy of dtrain's whose replicas each have a part of a sum of integers, if so."""
    summed = variable.dtype.is_integer and variable.aggregation == tf.VariableAggregation.SUM
    return layout_of(variable.distribute_strategy) if summed else None


def _write_parts(variable: Any, whole: Any, layout: ReplicaLayout) -> Any:
    """Gives each replica an equal part of a whole number, and the first of all what is over."""
    whole = tf.cast(whole, variable.dtype)
    part = whole // layout.replicas
    first = whole - part * (layout.replicas - 1)
    replicas = enumerate(variable.values, layout.first_replica)
    return tf.group([copy.assign(first if number == 0 else part) for number, copy in replicas])


def _shared_by_workers(variable: Any) -> bool:
    """Whether workers of a parameter-server strategy may write to a variable at the same time."""
    if "/job:ps/" in getattr(variable, "device", ""):
        return True
    return servers_of(getattr(variable, "_distribute_strategy", None)) is not None


def _in_replica_of(strategy: Any) -> bool:
    return tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context() is not None


def combined_on_read(variable: Any) -> Any:
    """The TensorFlow variable of which each replica has one that it writes alone; None for others."""
    found = underlying(variable)
    if not isinstance(found, tf.distribute.DistributedValues):
        return None
    return found if found.synchronization == tf.VariableSynchronization.ON_READ else None


def holds_parts(variable: Any) -> bool:
    """Whether each replica holds a part of a variable's value, which is their sum."""
    found = combined_on_read(variable)
    return found is not None and bool(found.aggregation == tf.VariableAggregation.SUM)
