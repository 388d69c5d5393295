"""The bytes that a replica holds of variables: a model's, and those that its optimizer has or would make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from dtrain.interfaces.divided_weights import divided_dim
from dtrain.upstream.tf_variables import underlying

Shape = tuple[int, ...]


def part_shapes(variables: Iterable[Any]) -> dict[Shape, Shape]:
    """The shapes of variables that are divided over the replicas, each with the shape of a replica's part.

    Args:
        variables: variables of Keras that have values.
    """
    divided = [variable for variable in map(underlying, variables) if divided_dim(variable) is not None]
    return {tuple(variable.shape): tuple(variable.values[0].shape) for variable in divided}


def held_bytes(tensor: Any, parts: Mapping[Shape, Shape]) -> int:
    """The bytes that a replica holds of a variable or tensor.

    Args:
        tensor: a variable of Keras or TensorFlow, or a tensor, whose shape is known.
        parts: the shapes of divided variables and of their parts. What has such a shape is divided as well.
    """
    shape = tuple(tensor.shape)
    return math.prod(parts.get(shape, shape)) * int(tf.as_dtype(tensor.dtype).size)


def optimizer_bytes(optimizer: Any, model: Any, parts: Mapping[Shape, Shape]) -> int:
    """The bytes that a replica holds of an optimizer's variables; if it is not built, of those it would make.

    Args:
        optimizer: the optimizer.
        model: the model whose weights it updates.
        parts: as for `held_bytes`.
    """
    if not optimizer.built:
        optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        # In a stateless scope, variables have shapes but no memory.
        with keras.StatelessScope():
            optimizer.build(model.trainable_variables)
    return sum(held_bytes(variable, parts) for variable in optimizer.variables)
