"""Splits each global batch evenly over the replicas, and counts its examples.

Every worker reads the same batches and takes its own part. So all workers end together, and every example is
used once. A dataset that can read only this worker's part does so. It does not split data that the user has
distributed or sharded by file: these keep TensorFlow's split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.row_checks import check_rows
from dtrain.keras_engine.rows import row_count, some_rows
from dtrain.upstream import tensorflow as upstream_tf


class Split(NamedTuple):
    """A global batch, split over the replicas.

    Attributes:
        parts: a batch for each replica of this process.
        total: examples in the global batch, int32 scalar; None where there is one replica only.
    """

    parts: tuple[Any, ...]
    total: Any


def rows_of(split: Split) -> Any:
    """Examples in a global batch that was split, an int32 scalar; -1 if it has no leading dimension."""
    if split.total is not None:
        return split.total
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


def split_batch(batch: Any, layout: ReplicaLayout) -> Split:
    """Splits a global batch: a part for each local replica, and the number of examples in the global batch.

    The sizes of the parts differ by at most one example. With fewer examples than replicas, some are empty.

    Args:
        batch: a nest of tensors, ragged or sparse tensors of one leading dimension; scalars and
            `tf.experimental.Optional`s go to every replica.
        layout: how the replicas are spread.

    Raises:
        DataError: the leaves have different numbers of rows (`row_checks.check_rows`), or none has rows.
    """
    rows = check_rows(batch, batch_rows(batch))
    known = tf.get_static_value(rows)
    replicas, first = layout.replicas, layout.first_replica
    parts = []
    for replica in range(first, first + layout.local_replicas):
        start, end = bounds(int(known) if known is not None else rows, replica, replicas)
        parts.append(map_leaves(lambda leaf, a=start, n=end - start: some_rows(leaf, a, n), batch))
    return Split(tuple(parts), tf.cast(rows, tf.int32))


def bounds(rows: Any, replica: int, replicas: int) -> tuple[Any, Any]:
    """The first row of a replica's part, and the row after its last one; ints or tensors, as `rows` is.

    The first `rows % replicas` parts have one row more.
    """
    each, more = rows // replicas, rows % replicas

    def least(number: int) -> Any:
        return min(number, more) if isinstance(rows, int) else tf.minimum(tf.cast(number, rows.dtype), more)

    return replica * each + least(replica), (replica + 1) * each + least(replica + 1)


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

    return tuple(map_leaves(lambda leaf, i=i: upstream_tf.replica_spec(leaf, i), spec) for i in range(count))


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
    found: list[Any] = []

    def note(leaf: Any) -> None:
        if leaf is not None:
            found.append(leaf)

    map_leaves(note, nest)
    return found


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
