"""Compares what a trial gives for two parts of some examples with what it gives for all of them.

Replicas are combined as means or as sums. A loss that is neither, such as the root of a mean, may show that
only here: twice the same examples give the same. What follows is decided in `probe.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.rows import is_dense, present_leaves
from dtrain.keras_engine.trial import OF_ALL_ROWS, Trial, TriedStep, cut_rows
from dtrain.keras_engine.written_state import Flow
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

HINT = f"Hint: make every part of the loss a mean over the examples, or {OF_ALL_ROWS}"
_APART = 0.005  # relative distance from which on two halves together do not give what the whole gives
_ROUNDING = 1e-7  # what rounding makes of 0, for values of about 1
_APART_ROUNDED = 0.05  # the same, where layers compute in 16 bits


def apart(
    trial: Trial, flow: Flow, step: TriedStep, tensors: list[list[Any]], here: Any, *, training: bool = True
) -> list[set[str]]:
    """For each point of a trial, as what the values of two parts do not give those of all examples.

    Args:
        trial: the trial.
        flow: what depends on what in its graph.
        step: the step that is tried.
        tensors: the values at each point, in the trial's graph.
        here: the values at each point for the step's examples.
        training: whether the trial calls the layers as in training.

    Returns:
        Sets of "mean", "sum" and, for values with a row for each example, "rows". They are empty where parts
        say nothing: of what random numbers change, of what follows from values of all replicas, which a trial
        does not have, and of a model that normalizes each replica's batch by itself in training.
    """
    rows, model = step.rows, step.model
    layers, plain = upstream_keras.layers_of(model), [flow.own_alone(each) for each in tensors]
    found: list[set[str]] = [set() for _ in here]
    if trial.rows_known or not any(plain) or (training and normalizes_batches(model)):
        return found
    rounded = any(layer.compute_dtype in ("float16", "bfloat16") for layer in layers)
    limit = _APART_ROUNDED if rounded else _APART
    dense = all(map(is_dense, present_leaves(step.part)))  # others may be padded to the longest of a batch
    # A mean over what a mask leaves is right by chance where the parts have as many of it.
    for cut in {rows // 2, rows // 4} - {0}:
        try:
            parts = [trial.run(part)[0] for part in cut_rows(step.part, cut, rows)]
        except Exception as error:  # it may need more rows
            logger.debug("%s of the examples cannot be tried out: %s", cut, error)
            continue
        weights = {"mean": (cut / rows, 1 - cut / rows), "sum": (1.0, 1.0)}
        for kinds, own, pair, whole in zip(found, plain, zip(*parts, strict=True), here, strict=True):
            if own:
                kinds |= {kind for kind, each in weights.items() if _distance(pair, whole, each) > limit}
            if own and dense and _distance_of_rows(pair, whole, (cut, rows - cut, rows)) > limit:
                kinds.add("rows")
    return found


def normalizes_batches(model: Any) -> bool:
    """Whether a model has layers that normalize each replica's batch by itself in training."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for layer in upstream_keras.layers_of(model)
    )


def _distance(parts: Any, whole: Sequence[Any], weights: tuple[float, float]) -> float:
    """How far the weighted values of two parts are together from those of the whole.

    Returns:
        The length of the difference over that of the whole; 0 if rounding alone may be the difference.
    """
    difference = size = rounding = 0.0
    for first, second, both in zip(*parts, whole, strict=True):
        if first is None or second is None or both is None:
            continue
        a, b, c = (tf.cast(tf.convert_to_tensor(each), tf.float64) for each in (first, second, both))
        if a.shape == b.shape == c.shape:
            difference += float(tf.reduce_sum((weights[0] * a + weights[1] * b - c) ** 2))
            size += float(tf.reduce_sum(c * c))
            rounding += _ROUNDING**2 * float(tf.size(c))
    return math.sqrt(difference / size) if size > 0 and difference > rounding else 0.0


def _distance_of_rows(parts: Any, whole: Sequence[Any], rows: tuple[int, int, int]) -> float:
    """How far the rows of two parts, one after the other, are from those of the whole.

    Returns:
        The length of the difference over that of the whole; infinite if a tensor has the examples in two
        dimensions, as one that compares each with each. Tensors without the examples are left out.
    """
    difference = size = 0.0
    for first, second, both in zip(*parts, whole, strict=True):
        if not isinstance(both, tf.Tensor) or both.dtype == tf.string:
            continue
        sizes = list(zip(first.shape, second.shape, both.shape, strict=False))
        axes = [axis for axis, found in enumerate(sizes) if found == rows]
        others = [found for axis, found in enumerate(sizes) if axis not in axes]
        if len(axes) > 1:
            return math.inf
        if not axes or any(len(set(found)) > 1 for found in others):  # such as words, up to the longest text
            continue
        joined = tf.cast(tf.concat([first, second], axis=axes[0]), tf.float64)
        both = tf.cast(both, tf.float64)
        difference += float(tf.reduce_sum((joined - both) ** 2))
        size += float(tf.reduce_sum(both * both))
    return math.sqrt(difference / size) if size > 0 else 0.0
