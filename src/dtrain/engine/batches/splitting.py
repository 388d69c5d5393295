"""Splits each global batch evenly over the replicas; refuses batches without a row for each example.

Every worker reads the same batches and takes its own part. So all workers end together, and every example is
used once. A dataset that can read only this worker's part does so. It does not split data that the user has
distributed or sharded by file: these keep TensorFlow's split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import (
    Split,
    batch_rows,
    bounds,
    map_leaves,
    part_sizes,
    row_count,
    some_rows,
)
from dtrain.errors import DataError
from dtrain.interfaces.replica_layout import ReplicaLayout

_BEGIN, _END = "dtrain: rows of a batch: ", " :end"
_NAMES = ("x", "y", "sample_weight")


def split_batch(batch: Any, layout: ReplicaLayout) -> Split:
    """Splits a global batch: a part for each local replica, and the number of examples of all parts.

    The sizes of the parts differ by at most one example. With fewer examples than replicas, some are empty.

    Args:
        batch: a nest of tensors, ragged or sparse tensors of one leading dimension; scalars and
            `tf.experimental.Optional`s go to every replica.
        layout: how the replicas are spread.

    Raises:
        DataError: the leaves have different numbers of rows (`check_rows`), or none has rows.
    """
    rows = check_rows(batch, batch_rows(batch))
    known = tf.get_static_value(rows)
    replicas, first = layout.replicas, layout.first_replica
    parts = []
    for replica in range(first, first + layout.local_replicas):
        start, end = bounds(int(known) if known is not None else rows, replica, replicas)
        parts.append(map_leaves(lambda leaf, a=start, n=end - start: some_rows(leaf, a, n), batch))
    return Split(tuple(parts), part_sizes(rows, replicas))


def check_rows(batch: Any, rows: Any) -> Any:
    """Checks that all parts of a batch have the same number of rows, one for each example.

    Args:
        batch: a nest of tensors, ragged or sparse tensors; scalars have no rows.
        rows: the number of examples, an integer scalar.

    Returns:
        `rows`. If the row counts are unknown while a graph is traced, reading `rows` at run time fails if
        they differ; `typed` makes a `DataError` of that error.

    Raises:
        DataError: the row counts are known and differ.
    """
    counts = {name: _rows(leaf) for name, leaf in _named(batch)}
    counts = {name: count for name, count in counts.items() if count is not None}
    known = {name: tf.get_static_value(count) for name, count in counts.items()}
    if len({int(count) for count in known.values() if count is not None}) > 1:
        raise _error(", ".join(f"{name}: {_shown(count)}" for name, count in known.items()))
    if all(count is not None for count in known.values()):
        return rows
    same = tf.reduce_all(tf.equal(tf.stack([*counts.values()]), tf.cast(rows, tf.int64)))
    text = ", ".join(f"{name}: {{}}" for name in (key.replace("{", "(").replace("}", ")") for key in counts))
    message = tf.strings.format(_BEGIN + text + _END, [*counts.values()])
    with tf.control_dependencies([tf.debugging.Assert(same, [message])]):
        return tf.identity(rows)


def data_error_of(error: tf.errors.OpError) -> DataError | None:
    """The `DataError` for an error that TensorFlow raised because of `check_rows`; None for any other."""
    match = re.search(f"{re.escape(_BEGIN)}(.*?){re.escape(_END)}", str(error), re.DOTALL)
    return None if match is None else _error(match[1].replace("\\'", "'"))


def _error(counts: str) -> DataError:
    return DataError(
        f"The parts of a batch have different numbers of rows ({counts}), so it cannot be cut by rows for "
        "several replicas.",
        hint=(
            "let each row of every part belong to one example: pad the parts to one size and batch them, or "
            "give them as ragged tensors, and merge graphs inside the model. A batch that must stay whole "
            "trains under a strategy with one replica"
        ),
    )


def _shown(count: Any) -> str:
    return "not known" if count is None else str(int(count))


def _rows(leaf: Any) -> Any:
    """The number of rows of a leaf, an int64 scalar; None if it has none or its rank is unknown."""
    unknown = isinstance(leaf, tf.Tensor) and leaf.shape.rank is None
    return None if unknown else row_count(leaf)


def _named(batch: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a batch, with names by the arguments of `fit`, such as `x['image']`."""
    whole = isinstance(batch, tuple) and not hasattr(batch, "_fields") and len(batch) <= len(_NAMES)
    for name, part in zip(_NAMES, batch, strict=False) if whole else [("x", batch)]:
        yield from _inside(name, part)


def _inside(name: str, nest: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from _inside(f"{name}[{key!r}]", value)
    elif isinstance(nest, list | tuple):
        for number, value in enumerate(nest):
            yield from _inside(f"{name}[{number}]", value)
    else:
        yield name, nest
