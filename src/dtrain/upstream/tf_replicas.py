"""What TensorFlow has no public API for about replicas: their values, numbers and communication.

The names that are reached by a path stand in `tensorflow_names.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.upstream import tensorflow_names


def per_replica(values: Sequence[Any]) -> Any:
    """Combines one value for each local replica to an argument of `strategy.run`; keeps nested structures.

    Args:
        values: one (nested) value for each replica; a single one is returned unchanged.
    """
    if len(values) == 1:
        return values[0]
    from tensorflow.python.distribute import distribute_utils

    return distribute_utils.regroup(tuple(values), always_wrap=True)


def merge_possible() -> bool:
    """Whether `merge_call` can be used here: not inside a nested `tf.function`, a condition or a loop."""
    from tensorflow.python.framework import ops

    graph = getattr(threading.current_thread(), "graph", None)
    return graph is None or ops.get_default_graph() is graph


@contextlib.contextmanager
def reducing_nothing(strategy: Any, whole: Callable[[Any], Any]) -> Iterator[None]:
    """Makes a strategy's reduce and gather methods, inside the context, use this replica's value only.

    Args:
        strategy: the strategy.
        whole: computes the result of a reduction or gather from the value.
    """
    alone = {
        tensorflow_names.REDUCE_TO.name: lambda op, value, *rest, **more: whole(value),
        tensorflow_names.BATCH_REDUCE_TO.name: lambda op, pairs, *rest, **more: [
            whole(value) for value, _ in pairs
        ],
        tensorflow_names.GATHER_TO.name: lambda value, *rest, **more: whole(value),
    }
    vars(strategy.extended).update(alone)
    try:
        yield
    finally:
        for name in alone:
            del vars(strategy.extended)[name]


def replica_id() -> Any:
    """The global number of the current replica: an int, or a tensor under several workers."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group if context is not None else 0


def local_replica_index() -> int:
    """The number of the current replica among the replicas of this process."""
    from tensorflow.python.distribute import values_util

    return values_util.get_current_replica_id_as_int() or 0


def device_memory(device: str) -> int:
    """The bytes that TensorFlow can allocate on one of its devices; of a CPU, the number says nothing."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session as session
    from tensorflow.python.eager import context

    context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    places = range(session.TF_DeviceListCount(devices))
    place = next(place for place in places if session.TF_DeviceListName(devices, place).endswith(device))
    return int(session.TF_DeviceListMemoryBytes(devices, place))


def container_of(component: Any) -> Any:
    """The distributed variable that contains one replica's variable; the variable itself if there is none."""
    container = getattr(component, "_distributed_container", None) or getattr(
        component.handle, "_distributed_container", None
    )
    return (container() if container is not None else None) or component


def replica_spec(spec: Any, replica: int) -> Any:
    """One local replica's part of a distributed dataset's spec; other specs are returned unchanged."""
    specs = getattr(spec, "_value_specs", None)
    return spec if specs is None else specs[replica]


def replace_launchers(extended: Any, make: Callable[..., Any]) -> None:
    """Replaces a strategy's launchers of collectives, one for each local device.

    Args:
        extended: the `extended` of a multi-worker strategy, before its first reduction.
        make: takes the arguments of TensorFlow's launcher, and returns the new launcher.
    """
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        operations._launchers = [
            make(old._group_key, old._group_size, old._collective_keys, old._device, old._options)
            for old in operations._launchers
        ]
