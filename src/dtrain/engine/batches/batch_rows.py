"""Batches and their rows: values with a row for each example, nests of them, and parts by rows.

The values are dense, ragged and sparse tensors. Each function takes any of the three kinds, so its callers
need not ask which it is. A batch is a nest of such values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.upstream import layer_calls, tf_replicas

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
        part = tf.ensure_shape(part, tf.TensorShape([count]).concatenate(value.shape[1:]))
    return part


def _sparse_rows(value: tf.SparseTensor, start: Any, count: Any) -> tf.SparseTensor:
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], axis=0)
    size = tf.concat([[tf.cast(count, tf.int64)], value.dense_shape[1:]], axis=0)
    part = tf.sparse.slice(value, begin, size)
    # sparse.slice clips the size to what is left; the leading dimension must be the part's.
    return like(value, tf.SparseTensor(part.indices, part.values, size))


def joined_rows(values: Sequence[Any]) -> Any:
    """The rows of several values, one after another; scalars become rows."""
    if isinstance(values[0], tf.SparseTensor):
        return like(values[0], tf.sparse.concat(axis=0, sp_inputs=list(values)))
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
        return like(leaf, tf.SparseTensor(leaf.indices, leaf.values, tf.maximum(leaf.dense_shape, least)))
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or leaf.shape[0] not in (None, 0):
        return leaf
    one = tf.concat([[1], tf.shape(leaf)[1:]], axis=0)
    padded = like(leaf, tf.cond(empty, lambda: tf.zeros(one, leaf.dtype), lambda: leaf))
    if (mask := layer_calls.mask_of(leaf)) is not None:
        layer_calls.set_mask(padded, with_zero_row(mask, empty))
    return padded


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
        return like(leaf, cut)
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    if leaf.shape[0] is not None and not (leaf.shape[0] == 1 and _is_true(empty)):
        return leaf
    trimmed = like(leaf, _cut_probabilities(leaf, empty))
    if (logits := layer_calls.logits_of(leaf)) is not None:
        layer_calls.set_logits(trimmed, like(logits, cut_row(logits, empty)))
    if (mask := layer_calls.mask_of(leaf)) is not None:
        layer_calls.set_mask(trimmed, cut_row(mask, empty))
    return trimmed


def cut_row(leaf: Any, empty: Any) -> Any:
    """A dense tensor, without rows if `empty` is true."""
    return tf.cond(empty, lambda: leaf[:0], lambda: leaf)


def _cut_probabilities(leaf: Any, empty: Any) -> Any:
    """`cut_row` for a tensor that may be probabilities.

    For the result of a softmax or sigmoid, it cuts the logits and applies the function to them again, because
    Keras' cross-entropies look for the logits behind the probabilities.
    """
    if tf.executing_eagerly() or leaf.op.type not in ("Softmax", "Sigmoid"):
        return cut_row(leaf, empty)
    logits = like(leaf.op.inputs[0], cut_row(leaf.op.inputs[0], empty))
    if leaf.op.type == "Softmax":
        return tf.raw_ops.Softmax(logits=logits)
    return tf.raw_ops.Sigmoid(x=logits)


def _is_true(empty: Any) -> bool:
    """Whether it is known while tracing that the replica has no examples."""
    return bool(tf.get_static_value(empty))


def like(leaf: Any, found: Any) -> Any:
    """Gives `found` the static shape of `leaf`, except for the number of rows."""
    if not tf.executing_eagerly() and leaf.shape.rank is not None:
        found.set_shape([None, *leaf.shape[1:]])
    return found


class Split(NamedTuple):
    """A global batch, split over the replicas.

    Attributes:
        parts: a batch for each replica of this process.
        sizes: the examples of each replica's part, of all processes, an int32 vector; None where there is one
            replica only.
    """

    parts: tuple[Any, ...]
    sizes: Any


def rows_of(split: Split) -> Any:
    """Examples in a global batch that was split, an int32 scalar; -1 if it has no leading dimension."""
    if split.sizes is not None:
        return tf.reduce_sum(split.sizes)
    # A single replica accepts data of any form.
    if any(tf.is_tensor(leaf) and leaf.shape.rank is None for leaf in _leaves(split.parts[0])):
        return tf.constant(-1)
    try:
        return batch_rows(split.parts[0])
    except (DataError, TypeError, ValueError):
        return tf.constant(-1)


def split_of(element: Any, *, whole: bool) -> Split:
    """An element of TensorFlow's iterator (`SplitIterator.tensors`) as a `Split`; also in a graph.

    Args:
        element: an element that was read.
        whole: whether the iterator yields whole batches.
    """
    return Split((element,), None) if whole else Split(*element)


def packed(element: tuple[Any, ...], spec: Any) -> Any:
    """An element that `Dataset.map` has unpacked into arguments, in its own structure again.

    `Dataset.map` unpacks tuples, but no named tuples.
    """
    if hasattr(spec, "_fields"):
        return type(spec)(*element) if len(element) != 1 else element[0]
    return element if isinstance(spec, tuple) else element[0]


def unconverted(function: Any) -> Any:
    """A function that AutoGraph does not convert, such as one of dtrain's own in `Dataset.map`."""
    return tf.autograph.experimental.do_not_convert(function)


def bounds(rows: Any, replica: Any, replicas: int) -> tuple[Any, Any]:
    """The first row of a replica's part, and the row after its last one; ints or tensors, as `rows` is.

    The first `rows % replicas` parts have one row more. Of tensors, `replica` may be one, too.
    """
    share, more = rows // replicas, rows % replicas

    def least(number: int) -> Any:
        return min(number, more) if isinstance(rows, int) else tf.minimum(tf.cast(number, rows.dtype), more)

    return replica * share + least(replica), (replica + 1) * share + least(replica + 1)


def part_sizes(rows: Any, replicas: int) -> tf.Tensor:
    """The rows of each replica's part (`bounds`), int32 of shape (..., replicas).

    Args:
        rows: of each batch, an int or integers of shape (...).
        replicas: the number of parts.
    """
    start, end = bounds(tf.cast(rows, tf.int32)[..., tf.newaxis], tf.range(replicas), replicas)
    return end - start


@dataclass(frozen=True)
class BatchParts:
    """Which parts of a batch this process reads.

    Attributes:
        replicas: the number of parts.
        first: the number of the first part that it reads.
        count: how many it reads.
    """

    replicas: int = 1
    first: int = 0
    count: int = 1

    def bounds(self, rows: Any) -> list[tuple[Any, Any]]:
        """The first row of each part, and the row after its last one, for a batch of `rows` examples."""
        return [bounds(rows, r, self.replicas) for r in range(self.first, self.first + self.count)]


def batch_rows(batch: Any) -> Any:
    """The number of examples in a batch, an int32 scalar: the leading dimension of the first leaf with one.

    Raises:
        DataError: no leaf of the batch has a leading dimension.
    """
    for leaf in _leaves(batch):
        rows = row_count(leaf, tf.int32)
        if rows is not None:
            return rows
    raise DataError(
        "The data yields scalars: there is no batch to split over the replicas.",
        hint="batch the dataset: dataset.batch(global_batch_size)",
    )


def local_parts(strategy: Any, batch: Any) -> tuple[Any, ...]:
    """A batch of a distributed dataset as one batch for each local replica."""
    count = len(strategy.extended.worker_devices)
    return tuple(
        map_leaves(lambda leaf, i=i: strategy.experimental_local_results(leaf)[i], batch)
        for i in range(count)
    )


def local_specs(strategy: Any, spec: Any) -> tuple[Any, ...]:
    """The specs of the batches of a distributed dataset, one for each local replica."""
    count = len(strategy.extended.worker_devices)

    return tuple(map_leaves(lambda leaf, i=i: tf_replicas.replica_spec(leaf, i), spec) for i in range(count))


def batch_spec(batch: Any) -> Any:
    """The `tf.TypeSpec`s of a nest of tensors and arrays; None stays None."""

    def one(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.TypeSpec):
            return leaf
        return tf.type_spec_from_value(leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf))

    return map_leaves(one, batch)


def to_tensors(batch: Any) -> Any:
    """Converts the arrays of a nest to tensors; None stays None."""
    return map_leaves(lambda x: x if x is None or _is_tensor(x) else tf.convert_to_tensor(x), batch)


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or isinstance(value, tf.experimental.Optional)


def _leaves(nest: Any) -> Iterator[Any]:
    if isinstance(nest, dict):
        for key in sorted(nest):
            yield from _leaves(nest[key])
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from _leaves(item)
    else:
        yield nest


def present_leaves(nest: Any) -> list[Any]:
    """The leaves of a nest that are not None, in the order of `map_leaves`."""
    leaves: list[Any] = []

    def note(leaf: Any) -> None:
        if leaf is not None:
            leaves.append(leaf)

    map_leaves(note, nest)
    return leaves


def row_bytes(leaf: Any) -> int:
    """The bytes of one row of a dense tensor, given the tensor or its spec."""
    return int(leaf.dtype.size * math.prod(leaf.shape[1:]))


def map_leaves(function: Any, nest: Any) -> Any:
    """Applies `function` to each tensor, ragged or sparse tensor, Optional and None of a nest."""
    if isinstance(nest, dict):
        return type(nest)((key, map_leaves(function, value)) for key, value in nest.items())
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_leaves(function, item) for item in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_leaves(function, item) for item in nest)
    return function(nest)


def without_optionals(batch: Any) -> Any:
    """A batch with None for every Optional; Keras passes a generator's None as an empty Optional."""
    return map_leaves(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


def without_optional_specs(spec: Any) -> Any:
    """The spec of `without_optionals`."""
    return map_leaves(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec)
