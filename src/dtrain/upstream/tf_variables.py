"""What TensorFlow has no public API for about variables: how they are made, written and told apart."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from dtrain.upstream.keras_variables import value_of
from dtrain.upstream.tf_replicas import container_of


def unnamed_variable_handle(dtype: Any, shape: Any) -> Any:
    """A handle for a variable that is created anew in each call of the function that is being traced."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    with tf.init_scope():
        name = context.anonymous_name()
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container="")


def variable_on(device: str, value: Any, dtype: Any, name: str | None) -> Any:
    """Creates a plain variable on one device, even inside the scope of a strategy.

    Args:
        device: the name of the device.
        value: the initial value: an array, or a function that returns one.
        dtype: the dtype of the variable.
        name: the name of the variable, or None.
    """
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    with tf.device(device):
        return ResourceVariable(value, trainable=False, dtype=dtype, name=name)


def variable_without_memory(device: str, shape: Any, dtype: Any, name: str, arguments: dict[str, Any]) -> Any:
    """A variable that has a shape and no value: for traces whose operations are never run as they are.

    Args:
        device: the name of its device.
        shape, dtype, name: of the variable.
        arguments: those of its creator.
    """
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    kept = {key: arguments.get(key) for key in ("trainable", "synchronization", "aggregation")}
    with tf.device(device):
        return UninitializedVariable(shape=shape, dtype=dtype, name=name, **kept)


def variable_in_place_of(variable: Any, value: Any) -> Any:
    """A plain variable with a value that optimizers and tapes take for another variable.

    Args:
        variable: the other one, such as one without memory.
        value: the value.
    """
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    with tf.device(variable.device):
        made = ResourceVariable(value, trainable=variable.trainable, dtype=variable.dtype)
    made._unique_id = variable._unique_id
    return made


def in_one_device_trace() -> bool:
    """Whether code is traced in which a distributed variable is its first copy (`one_device_tracing`)."""
    from tensorflow.python.distribute import values_util

    return bool(values_util.is_saving_non_distributed())


def set_aggregation(variable: Any, aggregation: Any) -> None:
    """Changes how the replicas' values of a sync-on-read variable are combined."""
    variable._aggregation = aggregation


@contextlib.contextmanager
def writes_whole(variable: Any) -> Iterator[bool]:
    """Enters a sync-on-read variable's strategy; yields whether a write here is of the whole value.

    Otherwise it is of the current replica's part, or of the only copy that is saved.
    """
    from tensorflow.python.distribute import distribute_lib, values_util

    if values_util.is_saving_non_distributed():
        yield False
        return
    with distribute_lib.enter_or_assert_strategy(variable.distribute_strategy):
        whole = distribute_lib.in_cross_replica_context() and not values_util.in_replica_update_context()
        if whole:
            values_util.mark_as_unsaveable()
        yield whole


def underlying(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable, or behind one replica's component of it."""
    import tensorflow as tf

    if isinstance(variable, tf.distribute.DistributedValues):
        return variable
    value = value_of(variable)
    # Ask it for no attribute: a variable that is summed on reading looks up what it lacks in its value, and
    # reading that value is an all-reduce over all workers.
    if isinstance(value, tf.distribute.DistributedValues):
        return value
    if getattr(value, "is_sharded_variable", False) is True:
        return value
    inner = value if isinstance(value, tf.Variable) else variable
    if isinstance(inner, tf.distribute.DistributedValues) or not isinstance(inner, tf.Variable):
        return inner
    return container_of(inner)


def creation_number(variable: Any) -> int:
    """A number that increases with each variable that the process creates.

    In processes that run the same program, the same variables have the same order.
    """
    digits = re.search(r"(\d+)$", str(variable._unique_id))
    return int(digits.group()) if digits else 0


def initial_value(arguments: dict[str, Any]) -> Any:
    """The initial value of a variable as a tensor, from the arguments of its creator."""
    import tensorflow as tf
    from tensorflow.python.trackable import base

    value = arguments["initial_value"]
    if callable(value):
        value = value()
    if isinstance(value, base.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=arguments.get("dtype"))
