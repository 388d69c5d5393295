"""Makes batch normalization use each replica's own moments in a step that is partitioned, as Keras promises.

With `synchronized=True` the moments are the whole batch's, which is what one program computes anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.thread_state import thread_state
from dtrain.partition.local_regions import local_region


def batch_normalization(
    original: Callable[..., Any], self: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """The replacement of `BatchNormalization.call`."""
    own = thread_state.single_program and training and self.trainable and not self.synchronized
    if not own or not isinstance(inputs, tf.Tensor) or not inputs.shape.rank:
        return original(self, inputs, training=training, mask=mask)
    if mask is None:
        return local_region(lambda rows: original(self, rows, training=training), inputs)
    mask = tf.convert_to_tensor(mask)
    return local_region(lambda rows, kept: original(self, rows, training=training, mask=kept), inputs, mask)
