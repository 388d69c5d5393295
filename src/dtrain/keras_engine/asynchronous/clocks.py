"""Measures, inside a graph, when tensors are ready, by the clock of the process that computes them.

The measurements do not change any computed value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import tensorflow as upstream_tf


def time_of(tensors: Sequence[Any]) -> tf.Tensor:
    """The time when all tensors are ready, in seconds since 1970, a float64 scalar; for use in a graph."""
    with tf.control_dependencies(list(tensors)):
        now = tf.timestamp()
    # Otherwise TensorFlow orders it with other stateful operations, by messages between servers and workers.
    upstream_tf.in_no_order(now.op)
    return now


def between(begun: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
    """Seconds from `begun` to `ended`; 0 if that is negative, as after a clock adjustment."""
    return tf.maximum(ended - begun, tf.zeros([], tf.float64))
