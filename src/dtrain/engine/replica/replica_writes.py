"""What a replica writes to variables, and the functions in which it does.

- A user's `tf.function` is inlined into the step that calls it. Replicas cannot communicate inside a nested
  function, and the step does not see what it looks up, writes or builds. Under parameter servers, such a
  function would keep variables of one block, which later blocks lack.
- Keras writes `assign_add` as `assign(self + value)`: in a variable that replicas sum, this sums the old
  value too, and with concurrent writers it loses updates. So the write is corrected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables.local_variable import LocalVariable
from dtrain.interfaces.managed_strategy import layout_of, managed
from dtrain.upstream import (
    graph_functions,
)
from dtrain.upstream.keras_variables import in_stateless_scope, value_of
from dtrain.upstream.tf_variables import underlying


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
    return managed(getattr(variable, "_distribute_strategy", None)).asynchronous is not None


def _written_in_step(variable: Any) -> bool:
    """Whether a replica of the variable's strategy, one of dtrain's, writes to it outside of the update."""
    strategy = getattr(variable, "distribute_strategy", None)
    if layout_of(strategy) is None or thread_state.updating_locally:
        return False
    return tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context() is not None


def combined_on_read(variable: Any) -> Any:
    """The TensorFlow variable, if each replica writes its own copy and a read combines them; else None."""
    tf_variable = underlying(variable)
    if not isinstance(tf_variable, tf.distribute.DistributedValues):
        return None
    return tf_variable if tf_variable.synchronization == tf.VariableSynchronization.ON_READ else None


def holds_parts(variable: Any) -> bool:
    """Whether each replica holds a part of a variable, so that its value is the sum of the parts."""
    tf_variable = combined_on_read(variable)
    return tf_variable is not None and bool(tf_variable.aggregation == tf.VariableAggregation.SUM)


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
