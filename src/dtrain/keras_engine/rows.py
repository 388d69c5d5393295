"""Values with rows, one for each example: dense, ragged and sparse tensors.

Each function takes any of the three kinds, so its callers need not ask which it is. Nests of such values are
handled in `input.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import keras as upstream_keras

_KINDS = (tf.RaggedTensor, tf.SparseTensor, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def is_dense(value: Any) -> bool:
    """Whether a value, or its `tf.TypeSpec`, is neither ragged nor sparse."""
    return not isinstance(value, _KINDS)


def as_tensor(value: Any) -> Any:
    """Converts a value to a tensor; ragged and sparse tensors stay as they are."""
    return tf.convert_to_tensor(value) if is_dense(value) else value


def row_count(value: Any, dtype: tf.DType = tf.int64) -> Any:
    """The number of rows, an integer scalar, which is a constant where it is known while tracing.

    None for a scalar, an Optional and None, which have no rows.
    """
    if value is None or isinstance(value, tf.experimental.Optional):
        return None
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], dtype)
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        return None
    static = value.shape[0] if value.shape.rank else None
    return tf.shape(value, dtype)[0] if static is None else tf.constant(static, dtype)


def some_rows(value: Any, start: Any, count: Any) -> Any:
    """`count` rows from row `start` on; a value without rows is returned as it is."""
    if value is None or isinstance(value, tf.experimental.Optional):
        return value
    if isinstance(value, tf.RaggedTensor):
        return value[start : start + count]
    if isinstance(value, tf.SparseTensor):
        return _sparse_rows(value, start, count)
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        return value
    part = value[start : start + count]
    if isinstance(count, int):
        part = tf.ensure_shape(part, [count, *value.shape[1:]])
    return part


def _sparse_rows(value: tf.SparseTensor, start: Any, count: Any) -> tf.SparseTensor:
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], axis=0)
    size = tf.concat([[tf.cast(count, tf.int64)], value.dense_shape[1:]], axis=0)
    part = tf.sparse.slice(value, begin, size)
    # sparse.slice clips the size to what is left; the leading dimension must be the part's.
    return _like(value, tf.SparseTensor(part.indices, part.values, size))


def joined_rows(values: Sequence[Any]) -> Any:
    """The rows of several values, one after another; scalars become rows."""
    if isinstance(values[0], tf.SparseTensor):
        return _like(values[0], tf.sparse.concat(axis=0, sp_inputs=list(values)))
    scalars = is_dense(values[0]) and values[0].shape.rank == 0
    return tf.stack(list(values)) if scalars else tf.concat(list(values), axis=0)


def any_rows(spec: Any) -> Any:
    """The spec of the same values with any number of rows."""
    if spec is None or not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    kind = tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec
    return kind(shape, spec.dtype)


def blank(spec: Any) -> Any:
    """Two rows of zeros or empty strings of a spec; None for the spec of an Optional and for None."""
    if spec is None or isinstance(spec, tf.OptionalSpec):
        return None
    shape = [2 if n is None else n for n in spec.shape]
    dense = tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(dense)
    return tf.sparse.from_dense(dense) if isinstance(spec, tf.SparseTensorSpec) else dense


def with_zero_row(leaf: Any, empty: Any) -> Any:
    """Gives a tensor without rows one row of zeros, if `empty` is true; other leaves stay as they are."""
    if isinstance(leaf, tf.RaggedTensor):
        splits = leaf.row_splits
        longer = tf.cond(empty, lambda: tf.zeros([2], splits.dtype), lambda: splits)
        return tf.RaggedTensor.from_row_splits(leaf.values, longer, validate=False)
    if isinstance(leaf, tf.SparseTensor):
        least = tf.concat([tf.cast([empty], tf.int64), tf.zeros_like(leaf.dense_shape[1:])], axis=0)
        return _like(leaf, tf.SparseTensor(leaf.indices, leaf.values, tf.maximum(leaf.dense_shape, least)))
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or leaf.shape[0] not in (None, 0):
        return leaf
    one = tf.concat([[1], tf.shape(leaf)[1:]], axis=0)
    found = _like(leaf, tf.cond(empty, lambda: tf.zeros(one, leaf.dtype), lambda: leaf))
    if (mask := upstream_keras.mask_of(leaf)) is not None:
        upstream_keras.set_mask(found, with_zero_row(mask, empty))
    return found


def without_zero_row(leaf: Any, empty: Any) -> Any:
    """Removes the row that was computed from the row of zeros; leaves without rows stay as they are."""
    if isinstance(leaf, tf.RaggedTensor):
        splits = leaf.row_splits
        kept = tf.cond(empty, lambda: splits[:1], lambda: splits)
        return tf.RaggedTensor.from_row_splits(leaf.values[: kept[-1]], kept, validate=False)
    if isinstance(leaf, tf.SparseTensor):
        rows = tf.where(empty, tf.zeros([], tf.int64), leaf.dense_shape[0])
        cut = tf.sparse.slice(
            leaf, tf.zeros_like(leaf.dense_shape), tf.concat([[rows], leaf.dense_shape[1:]], 0)
        )
        return _like(leaf, cut)
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    if leaf.shape[0] is not None and not (leaf.shape[0] == 1 and _is_true(empty)):
        return leaf
    found = _like(leaf, _cut_probabilities(leaf, empty))
    if (logits := upstream_keras.logits_of(leaf)) is not None:
        upstream_keras.set_logits(found, _like(logits, cut_row(logits, empty)))
    if (mask := upstream_keras.mask_of(leaf)) is not None:
        upstream_keras.set_mask(found, cut_row(mask, empty))
    return found


def cut_row(leaf: Any, empty: Any) -> Any:
    """A dense tensor, without rows if `empty` is true."""
    return tf.cond(empty, lambda: leaf[:0], lambda: leaf)


def _cut_probabilities(leaf: Any, empty: Any) -> Any:
    """`cut_row` for a tensor that may be probabilities.

    The result of a softmax or sigmoid is again made by one, because Keras' cross-entropies use its logits.
    """
    if tf.executing_eagerly() or leaf.op.type not in ("Softmax", "Sigmoid"):
        return cut_row(leaf, empty)
    logits = _like(leaf.op.inputs[0], cut_row(leaf.op.inputs[0], empty))
    if leaf.op.type == "Softmax":
        return tf.raw_ops.Softmax(logits=logits)
    return tf.raw_ops.Sigmoid(x=logits)


def _is_true(empty: Any) -> bool:
    """Whether it is known while tracing that the replica has no examples."""
    return bool(tf.get_static_value(empty))


def _like(leaf: Any, found: Any) -> Any:
    """Gives `found` the static shape of `leaf`, except for the number of rows."""
    if not tf.executing_eagerly() and leaf.shape.rank is not None:
        found.set_shape([None, *leaf.shape[1:]])
    return found
