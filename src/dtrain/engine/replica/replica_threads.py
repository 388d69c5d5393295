"""The threads of a process' replicas, which take turns with the same objects.

Each has its own Python attributes of these objects (`replica_attributes.py`), and ends its turn where it
waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.replica_attributes import PerReplicaAttributes, PerReplicaObjects
from dtrain.engine.replica.thread_state import thread_state
from dtrain.upstream import (
    graph_functions,
    keras_names,
    tensorflow_names,
    tf_replicas,
)
from dtrain.upstream.reach import set_methods


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
            result = fn(*args, **kwargs)
        # The last replica's attributes stay on the objects, as the last call's do on one device.
        if tf_replicas.local_replica_index() < local_replicas - 1:
            own.end_turn()
        return result

    graph_functions.mark_converted(one_replica)
    return one_replica


def merge_call(original: Callable[..., Any], self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    """The `merge_call` of a replica's context, where a replica's thread waits for the others."""
    own = thread_state.own_attributes
    if own is None:
        return original(self, fn, args, kwargs)
    own.end_turn()
    result = original(self, fn, args, kwargs)
    own.begin_turn()
    return result


def share_build(layer: Any) -> None:
    """Makes the attributes that a layer is given while it is built those of all replicas."""
    if thread_state.own_attributes is not None and not layer.built:
        set_methods(layer, keras_names.MAYBE_BUILD)


def maybe_build(original: Callable[..., Any], self: Any, call_spec: Any) -> Any:
    """A layer's method that builds it at its first call."""
    own = None if self.built else thread_state.own_attributes
    result = original(self, call_spec)
    if own is not None:
        own.share(self)
    return result


def watch(root: Any) -> None:
    """From here on, gives this replica its own attributes of an object and of all reachable from it."""
    own = thread_state.own_attributes
    if own is not None:
        own.watch(root)
