"""Keeps the non-trainable state of layers, such as moving statistics, equal on all replicas.

Within a step each replica writes its own copy. At the end of the step, one all-reduce replaces the copies by
their mean, weighted by the replicas' shares of the examples. Integers (seeds, counters) are left alone,
because they advance equally on all replicas.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import ReplicaStep, local_update


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


def _at_least_float32(value: Any) -> Any:
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value
