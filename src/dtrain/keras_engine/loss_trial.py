"""Finds out whether a user's own loss couples examples: computes it with and without some of them.

Which losses are tried, and with which batch, is decided in `probe.py`.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.losses_and_metrics import converted, overrides_call
from dtrain.keras_engine.rows import as_tensor, map_leaves


def find_coupling(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether a loss couples examples; found out by computing it without some of them.

    Args:
        loss: a `keras.losses.Loss`.
        y_true: the labels of some examples, a nest of eager tensors.
        y_pred: the model's predictions for these examples.
    """
    if overrides_call(loss):
        return not _is_mean(loss, y_true, y_pred)
    y_true, y_pred = converted(loss, y_true), converted(loss, y_pred)
    every = as_tensor(loss.call(y_true, y_pred))
    if every.shape.rank == 0 or every.shape[0] is None or every.shape[0] < 2:
        return False
    half = every.shape[0] // 2
    some = as_tensor(loss.call(*map_leaves(lambda leaf: leaf[:half], (y_true, y_pred))))
    if some.shape[1:] != every.shape[1:]:
        return True
    some, same = (_dense(values) for values in (some, every[:half]))
    return not bool(tf.reduce_all(tf.abs(some - same) <= 1e-4 * (tf.abs(some) + 1e-3)))


def _dense(values: Any) -> Any:
    return values.flat_values if isinstance(values, tf.RaggedTensor) else values


def _is_mean(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the loss of some examples is the mean of the losses of their two halves."""
    half = keras.tree.flatten(y_pred)[0].shape[0] // 2
    parts = [slice(0, 2 * half), slice(0, half), slice(half, 2 * half)]
    values = [
        tf.convert_to_tensor(loss(*map_leaves(lambda leaf, rows=rows: leaf[rows], (y_true, y_pred))))
        for rows in parts
    ]
    if values[0].shape.rank != 0:
        return False
    whole, mean = values[0], (values[1] + values[2]) / 2
    return half > 0 and bool(tf.abs(whole - mean) <= 1e-4 * (tf.abs(whole) + 1e-3))
