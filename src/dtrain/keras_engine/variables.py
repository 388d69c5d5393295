"""Keras variables' `assign_add` and `assign_sub`, done by the TensorFlow variable itself.

Keras writes `assign(self + value)`: under an aggregation that sums the old value over the replicas too,
and under concurrent writers it loses updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.stand_in import StandIn
from dtrain.keras_engine.context import updating_locally
from dtrain.keras_engine.protocol import layout_of, servers_of
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


def _shared_by_workers(variable: Any) -> bool:
    """Whether workers of a parameter-server strategy may write to a variable at the same time."""
    if "/job:ps/" in getattr(variable, "device", ""):
        return True
    return servers_of(getattr(variable, "_distribute_strategy", None)) is not None


def _in_replica_of(strategy: Any) -> bool:
    return tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context() is not None
