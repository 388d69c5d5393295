"""Makes Keras' losses those of the global batch in a loop of the user's own.

A replica's loss is its part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.batch_rows import as_tensor
from dtrain.engine.replica.context import all_reduce_sum, in_replica, reporting_one_replica
from dtrain.errors import CompilationError
from dtrain.interfaces.managed_strategy import current_layout
from dtrain.upstream import (
    keras_names,
    tf_replicas,
)

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def _undivided() -> bool:
    """Whether losses are not divided by the number of replicas, although Keras would in any strategy's scope.

    A loss that a program computes in a scope, but not in a replica, is that of the whole batch and not a part
    of a sum.
    """
    return current_layout() is not None and not in_replica()


def _without_division(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' own function, which divides by a number of replicas of 1."""

    def undivided(*args: Any) -> Any:
        with reporting_one_replica():
            return original(*args)

    return undivided


def unscale(original: Callable[..., Any], value: Any) -> Any:
    """The replacement of the function by which Keras multiplies a loss by the number of replicas."""
    return value if _undivided() else original(value)


def additional_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """The model's aggregation of a loss that a layer adds."""
    return (_without_division(original) if _undivided() else original)(self, loss)


def reduce_weighted(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """The replacement of Keras' reduction of per-example losses to one value."""
    original = _without_division(original) if _undivided() else original
    if in_replica():
        return _part_of_sum(original, as_tensor(values), sample_weight, mask, reduction, dtype)
    return original(values, sample_weight, mask, reduction, dtype)


def _part_of_sum(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
    dtype: Any,
) -> Any:
    """This replica's part of a loss in a custom loop: the parts' sum is the loss of the global batch.

    Keras' own value is returned for a reduction that is no mean, and where replicas cannot communicate.
    """
    if reduction not in _MEANS or values.shape.rank == 0 or not tf_replicas.merge_possible():
        return original(values, sample_weight, mask, reduction, dtype)
    total = _total(original, values, sample_weight, mask, dtype)
    try:
        divisor = _divisor(values, sample_weight, mask, reduction)
    except CompilationError:
        return original(values, sample_weight, mask, reduction, dtype)
    return tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))


def _total(original: Callable[..., Any], values: Any, sample_weight: Any, mask: Any, dtype: Any) -> Any:
    """This replica's weighted sum of losses."""
    return tf.reduce_sum(original(values, sample_weight, mask, "sum", dtype))


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """The number by which Keras would divide the sum of the losses of the global batch."""
    count = tf.cast(tf.size(values), tf.float32)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight)
        if mask is not None:
            mask = tf.convert_to_tensor(mask)
        weights = keras_names.APPLY_MASK.resolve()(
            sample_weight, mask, dtype=keras.backend.floatx(), reduction=reduction
        )
        return all_reduce_sum(tf.reduce_sum(tf.cast(weights, tf.float32)))
    if mask is None:
        return all_reduce_sum(count)
    mask = tf.convert_to_tensor(mask)
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    everywhere = tf.cast(tf.size(mask), tf.float32)
    count, valid, everywhere = tf.unstack(all_reduce_sum(tf.stack([count, valid, everywhere])))
    return tf.math.divide_no_nan(count * valid, everywhere)
