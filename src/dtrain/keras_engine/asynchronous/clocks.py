"""When something is there, by the clock of whoever computes it.

Clocks only look on: nothing that is computed depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import tensorflow as upstream_tf


def time_of(tensors: Sequence[Any]) -> tf.Tensor:
    """The time when all of some tensors are there, in seconds, a float64 scalar; in a graph."""
    with tf.control_dependencies(list(tensors)):
        now = tf.timestamp()
    # Else servers and workers would tell each other of it, to keep it in order with what they do.
    upstream_tf.in_no_order(now.op)
    return now


def between(begun: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
    """Seconds from one time to another; 0 where the clock was put back, or the second came first."""
    return tf.maximum(ended - begun, tf.zeros([], tf.float64))
