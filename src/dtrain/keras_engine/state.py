"""Keeps the non-trainable state of layers, such as moving statistics, equal on all replicas.

Each replica writes its own copy. At the end of a step of `fit`, and in a loop of the user's own after the
outermost layer, one all-reduce replaces the copies by their mean, weighted by the replicas' shares of the
examples. Integers (seeds, counters) are left alone, because they advance equally on all replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.context import ReplicaStep, all_reduce_sum, local_update, underlying, writing
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf


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
