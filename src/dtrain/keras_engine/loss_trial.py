"""Finds out whether a user's own loss couples examples: computes it with and without some of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.keras_engine.context import current_step
from dtrain.keras_engine.losses_and_metrics import converted, is_own_loss, overrides_call
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.rows import as_tensor, map_leaves, present_leaves
from dtrain.keras_engine.trial import Trial, TrialStep, some_rows_of
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras


def coupled_losses(model: Any, part: Any, layout: ReplicaLayout, rows: int) -> list[bool]:
    """Whether each compiled loss couples examples: computes an example's loss from other examples too.

    A user's own loss that cannot be tried counts as coupled, which is slower but always correct.

    Args:
        model: a compiled and built model; it is called, and its state is restored.
        part: a batch of one replica.
        layout: the layout of the model's strategy.
        rows: the number of examples to try with; with fewer than two, no loss is tried.
    """
    losses = upstream_keras.compiled_losses(model)
    own = [is_own_loss(loss) for _, loss in losses]
    x, y_true, _ = keras.utils.unpack_x_y_sample_weight(part)
    if rows < 2 or y_true is None or not any(own):
        return own

    def predict(x: Any) -> Any:
        trial = TrialStep(layout, size=rows, total=rows, training=False)
        with current_step.set(trial):
            return model(x, training=False) if upstream_keras.takes_training(model) else model(x)

    try:
        x, y_true = _different_rows(x, y_true, rows)
        y_pred, _ = Trial(predict, x, model.distribute_strategy).run(x)
        return [
            mine and find_coupling(loss, _at(path, y_true), _at(path, y_pred))
            for mine, (path, loss) in zip(own, losses, strict=True)
        ]
    except Exception as error:
        logger.debug("the losses cannot be tried out: %s", error, exc_info=True)
        return own


def _at(path: Any, nest: Any) -> Any:
    for key in path:
        nest = nest[key]
    return nest


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
    for rows in (slice(0, half), slice(half, None)):
        some = as_tensor(loss.call(*map_leaves(lambda leaf, rows=rows: leaf[rows], (y_true, y_pred))))
        if some.shape[1:] != every.shape[1:]:
            return True
        some, same = (_dense(values) for values in (some, every[rows]))
        if not bool(tf.reduce_all(tf.abs(some - same) <= 1e-4 * (tf.abs(some) + 1e-3))):
            return True
    return False


def _different_rows(x: Any, y_true: Any, rows: int) -> Any:
    """Some rows of a batch whose labels differ, the smallest first and the largest last.

    A loss that weights the examples by the labels of the others shows that only where these differ. If all
    are of one class, as in a part of sorted data, some get another one.
    """
    leaves = present_leaves((x, y_true))
    labels = present_leaves(y_true)
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves) or any(
        leaf.dtype == tf.string for leaf in labels
    ):
        return some_rows_of((x, y_true), 0, rows)
    count = int(labels[0].shape[0])
    sizes = [tf.reduce_sum(tf.reshape(tf.cast(leaf, tf.float32), [count, -1]), axis=1) for leaf in labels]
    order = np.argsort(sum(each.numpy() for each in sizes), kind="stable")
    chosen = order[np.linspace(0, count - 1, rows).round().astype(int)]
    x, y_true = map_leaves(lambda leaf: None if leaf is None else tf.gather(leaf, chosen), (x, y_true))
    return x, map_leaves(_of_two_classes, y_true)


def _of_two_classes(labels: Any) -> Any:
    """Labels that are all of one class, 0 or 1 or one-hot, with another class in their second half."""
    if labels is None or not bool(tf.reduce_all(labels == labels[:1])):
        return labels
    first, half = labels[0].numpy(), len(labels) // 2
    if first.size > 1 and np.array_equal(np.sort(first.ravel())[-2:], [0, 1]) and first.sum() == 1:
        other = tf.roll(labels[half:], 1, axis=-1)
    elif np.isin(first, (0, 1)).all():
        other = tf.cast(1 - tf.cast(labels[half:], tf.int32), labels.dtype)
    else:
        return labels
    return tf.concat([labels[:half], other], axis=0)


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
