"""Variables that are split by rows over several parameter servers, handled as lists of parts.

TensorFlow calls them sharded variables. A variable that is not split has one part: itself. Which variables
are split is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream.tf_variables import underlying


def is_split(variable: Any) -> bool:
    """Whether a Keras or TensorFlow variable consists of several variables."""
    return getattr(underlying(variable), "is_sharded_variable", False) is True


def parts_of(variable: Any) -> list[Any]:
    """The TensorFlow variables that a variable consists of, in the order of their rows."""
    tf_variable = underlying(variable)
    return list(tf_variable.variables) if is_split(tf_variable) else [tf_variable]


def rows_of(variable: Any) -> list[int]:
    """How many rows each part has."""
    return [int(part.shape[0]) for part in parts_of(variable)]


def first_rows(variable: Any) -> list[int]:
    """The first row of each part."""
    starts, row = [], 0
    for rows in rows_of(variable):
        starts.append(row)
        row += rows
    return starts


def part_of_value(value: Any, variable: Any, number: int) -> Any:
    """The rows of one part, of a value for the whole variable.

    Args:
        value: a tensor, a split variable or `tf.IndexedSlices` of the variable's shape. Any other value is
            returned unchanged, for each part.
        variable: the whole, split variable.
        number: the number of the part, from 0.
    """
    start, rows = first_rows(variable)[number], rows_of(variable)[number]
    if isinstance(value, tf.IndexedSlices):
        return _slices_in(value, start, rows)
    if is_split(value):
        return parts_of(value)[number]
    shape = getattr(value, "shape", None)
    if shape is None or list(shape) != list(underlying(variable).shape):
        return value
    return tf.convert_to_tensor(value)[start : start + rows]


def joined_gradient(gradients: Sequence[Any], variable: Any) -> Any:
    """The gradient of a whole variable from those of its parts: tensors, `tf.IndexedSlices` or None."""
    if all(gradient is None for gradient in gradients):
        return None
    starts, rows = first_rows(variable), rows_of(variable)
    shape = list(underlying(variable).shape)
    if all(gradient is None or isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        present = [(g, start) for g, start in zip(gradients, starts, strict=True) if g is not None]
        indices = [g.indices + tf.cast(start, g.indices.dtype) for g, start in present]
        values = tf.concat([g.values for g, _ in present], axis=0)
        indices = tf.concat([tf.cast(i, tf.int64) for i in indices], axis=0)
        return tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64))
    dense = [
        tf.zeros([count, *shape[1:]], underlying(variable).dtype) if g is None else tf.convert_to_tensor(g)
        for g, count in zip(gradients, rows, strict=True)
    ]
    return tf.concat(dense, axis=0)


def _slices_in(slices: tf.IndexedSlices, start: int, rows: int) -> tf.IndexedSlices:
    inside = tf.logical_and(slices.indices >= start, slices.indices < start + rows)
    indices = tf.boolean_mask(slices.indices, inside) - tf.cast(start, slices.indices.dtype)
    shape = tf.concat([[rows], slices.dense_shape[1:]], axis=0) if slices.dense_shape is not None else None
    if shape is not None:
        shape = tf.cast(shape, slices.indices.dtype)
    return tf.IndexedSlices(tf.boolean_mask(slices.values, inside), indices, shape)
