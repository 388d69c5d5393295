"""Compares what a trial gives for two halves of some examples with what it gives for all of them.

Replicas are combined as means or as sums. A loss that is neither, such as the root of a mean, may show that
only here: twice the same examples give the same. What follows is decided in `probe.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.trial import Trial, halves_of
from dtrain.keras_engine.written_state import Flow
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

_APART = 0.005  # relative distance from which on two halves together do not give what the whole gives
_APART_ROUNDED = 0.05  # the same, where layers compute in 16 bits


def apart(
    trial: Trial, flow: Flow, tensors: list[list[Any]], once: Any, here: Any, *, model: Any, rows: int
) -> list[frozenset[str]]:
    """For each point of a trial, as what the values of two halves do not give those of all examples.

    Args:
        trial: the trial.
        flow: what depends on what in its graph.
        tensors: the values at each point, in the trial's graph.
        once: the examples.
        here: the values at each point for these.
        model: the model.
        rows: the number of the examples.

    Returns:
        Sets of "mean" and "sum". They are empty where halves say nothing: of what random numbers change, of
        what follows from values of all replicas, which a trial does not have, and of a model that normalizes
        each replica's batch by itself.
    """
    half, layers = rows // 2, upstream_keras.layers_of(model)
    plain = [flow.own_alone(each) for each in tensors]
    if trial.rows_known or not half or not any(plain) or any(map(_normalizes_batches, layers)):
        return [frozenset()] * len(here)
    try:
        halves = zip(*(trial.run(part)[0] for part in halves_of(once, rows)), strict=True)
    except Exception as error:  # it may need more rows
        logger.debug("half of the examples cannot be tried out: %s", error)
        return [frozenset()] * len(here)
    rounded = any(layer.compute_dtype in ("float16", "bfloat16") for layer in layers)
    limit = _APART_ROUNDED if rounded else _APART
    weights = {"mean": (half / rows, 1 - half / rows), "sum": (1.0, 1.0)}
    return [
        frozenset(kind for kind, each in weights.items() if own and _distance(pair, whole, each) > limit)
        for own, pair, whole in zip(plain, halves, here, strict=True)
    ]


def _normalizes_batches(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and bool(layer.trainable)


def _distance(halves: Any, whole: Sequence[Any], weights: tuple[float, float]) -> float:
    """How far the weighted values of two halves are together from those of the whole.

    Returns:
        The length of the difference over that of the whole.
    """
    difference = size = 0.0
    for first, second, both in zip(*halves, whole, strict=True):
        if first is None or second is None or both is None:
            continue
        a, b, c = (tf.cast(tf.convert_to_tensor(each), tf.float64) for each in (first, second, both))
        if a.shape == b.shape == c.shape:
            difference += float(tf.reduce_sum((weights[0] * a + weights[1] * b - c) ** 2))
            size += float(tf.reduce_sum(c * c))
    return math.sqrt(difference / size) if size > 0 else 0.0
