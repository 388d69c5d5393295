"""Gradients of divided weights: in a partitioned step each replica needs what it holds of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.interfaces.divided_weights import divided_dim
from dtrain.partition.marks import like_weight
from dtrain.upstream.tf_variables import underlying


def like_weights(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """Gradients, each divided as its weight is; slices, and those of weights that are whole, as they are."""
    return [_like_weight(gradient, weight) for gradient, weight in zip(gradients, weights, strict=False)]


def _like_weight(gradient: Any, weight: Any) -> Any:
    dim = divided_dim(underlying(weight)) if isinstance(gradient, tf.Tensor) else None
    return gradient if dim is None else like_weight(gradient, weight.shape, dim)
