"""Arrays as a table of examples: columns of one length, each dense or ragged, fetched by row number.

It checks that the columns fit together. It decides neither the order of the rows nor what is done to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        values: dense: of shape (examples, ...); ragged: the values of all rows, concatenated.
        splits: row splits of a ragged column, int64 of shape (examples + 1,): where each row begins, and
            where the last one ends. None if dense.
    """

    values: np.ndarray
    splits: np.ndarray | None = None

    @property
    def examples(self) -> int:
        """The number of rows."""
        return len(self.values) if self.splits is None else len(self.splits) - 1

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec of one row."""
        shape = self.values.shape[1:]
        if self.splits is not None:
            shape = (None, *shape)
        return tf.TensorSpec(shape, tf.as_dtype(self.values.dtype))


def columns_of(source: Any) -> Any:
    """The columns of a source: the same nest of tuples and dictionaries, each leaf a `Column`.

    Args:
        source: NumPy arrays, tensors or lists, alone or in tuples, named tuples and dictionaries. A list is
            one column of numbers, of texts or, for ragged data, of lists.

    Raises:
        DataError: a column is not an array, columns differ in length, or there are no examples.
        ConfigurationError: the source is of another kind, such as a `tf.data.Dataset`.
    """
    _check_kind(source)
    columns = _nest(source, "the source")
    named = list(named_columns(columns))
    if not named:
        raise DataError("The source has no arrays.", hint="give arrays, such as (images, labels)")
    lengths = {name: column.examples for name, column in named}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(
            f"The arrays of the source have different lengths ({listed}).",
            hint="each needs one row for each example, in the same order",
        )
    if named[0][1].examples == 0:
        raise DataError("The source has no examples.", hint="check what was read or filtered before")
    return columns


def named_columns(nest: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest of columns, each with its name: `image`, `0`, or `inputs/0` if nested."""
    if isinstance(nest, dict):
        items = [(str(key), nest[key]) for key in sorted(nest)]
    elif isinstance(nest, tuple):
        items = list(zip(getattr(nest, "_fields", map(str, range(len(nest)))), nest, strict=True))
    else:
        yield name or "0", nest
        return
    for key, value in items:
        yield from named_columns(value, f"{name}/{key}" if name else key)


class ColumnTable:
    """Examples in memory.

    Args:
        columns: a nest of `Column`s of one length.
        numbers: the number of each example in the whole source, int64 of shape (examples,); None if the table
            holds the whole source in order.

    Attributes:
        columns: as given.
        examples: number of rows.
        spec: a nest of `tf.TensorSpec`, of one example.

    Raises:
        DataError: the rows of a column have no values.
    """

    endless = False

    def __init__(self, columns: Any, numbers: np.ndarray | None = None) -> None:
        self.columns = columns
        leaves = tf.nest.flatten(columns)
        self.examples: int = leaves[0].examples
        if any(0 in column.values.shape[1:] for column in leaves):
            raise DataError("An array of the source has rows without any value.", hint="leave it out")
        self.spec = tf.nest.map_structure(lambda column: column.spec, columns)
        self._numbers = numbers
        self._tensors: Any = None

    def open(self) -> None:
        """Converts the arrays to tensors, once and eagerly, so that no graph holds a copy of its own."""
        if self._tensors is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._tensors = tf.nest.map_structure(_tensor, self.columns)

    def fetch(self, indices: Any) -> Any:
        """The rows at `indices`: a nest of tensors, ragged where the column is ragged.

        Args:
            indices: int64 of shape (n,).
        """
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), self._tensors)

    def numbers(self, indices: Any) -> Any:
        """The numbers, in the whole source, of the rows at `indices`: int64 of shape (n,)."""
        return indices if self._numbers is None else tf.gather(tf.constant(self._numbers), indices)


def _check_kind(source: Any) -> None:
    if isinstance(source, tf.data.Dataset):
        raise ConfigurationError(
            "The source is a tf.data.Dataset, whose order cannot be computed.",
            hint="give its arrays or files, or a function InputContext -> tf.data.Dataset of single examples",
        )
    usable = isinstance(source, tuple | Mapping | np.ndarray | list | tf.Tensor | tf.RaggedTensor)
    if not usable and not hasattr(source, "__array__"):
        raise ConfigurationError(
            f"The source is a {type(source).__name__}.",
            hint=(
                "give arrays of one length in a tuple or dictionary, dtrain.data.tfrecords(...), "
                "dtrain.data.array_records(...), or a function InputContext -> tf.data.Dataset"
            ),
        )


def _nest(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return {key: _nest(value, str(key)) for key, value in source.items()}
    if isinstance(source, tuple) and hasattr(source, "_fields"):
        return type(source)(*(_nest(v, k) for k, v in zip(source._fields, source, strict=True)))
    if isinstance(source, tuple):
        return tuple(_nest(value, f"array {number}") for number, value in enumerate(source))
    return _column(source, name)


def _column(leaf: Any, name: str) -> Column:
    if isinstance(leaf, tf.RaggedTensor):
        if leaf.ragged_rank != 1:
            raise DataError(
                f"{name} is ragged in {leaf.ragged_rank} dimensions.", hint="only rows may be ragged"
            )
        return Column(leaf.flat_values.numpy(), leaf.row_splits.numpy().astype(np.int64))
    if isinstance(leaf, tf.SparseTensor):
        raise DataError(
            f"{name} is a sparse tensor.", hint="tf.sparse.to_dense(...), or indices as ragged rows"
        )
    if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and leaf.dtype == object):
        return _from_rows(leaf, name)
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is not an array: {error}", hint="give NumPy arrays or lists") from error
    return _dense(array, name)


def _from_rows(rows: Any, name: str) -> Column:
    """A column from a list, or from an array of objects."""
    if any(isinstance(row, str | bytes) for row in rows):
        wrong = next((n for n, row in enumerate(rows) if not isinstance(row, str | bytes)), None)
        if wrong is not None:
            kind = type(rows[wrong]).__name__
            raise DataError(f"{name} holds texts, but example {wrong} is a {kind}.", hint="give texts only")
        return Column(np.array(rows, dtype=object))
    try:
        parts = [np.asarray(row) for row in rows]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} is ragged in more than one dimension: {error}", hint="one is possible"
        ) from error
    for number, part in enumerate(parts):
        if part.dtype.kind not in "biufSU":
            raise DataError(
                f"{name} holds a {type(rows[number]).__name__} in example {number}.",
                hint="give numbers, texts, or lists of them",
            )
        if part.ndim != parts[0].ndim or part.shape[1:] != parts[0].shape[1:]:
            raise DataError(
                f"In {name} example {number} has the shape {part.shape}, but example 0 has {parts[0].shape}.",
                hint="examples may differ in their first dimension only",
            )
    if len({part.shape for part in parts}) <= 1:
        return _dense(np.asarray(parts), name)
    splits = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    # NumPy makes a float array of an empty list; it must not turn integer rows into floats.
    full = [part for part in parts if part.size]
    values = np.concatenate(full) if full else np.concatenate(parts)
    return Column(_dense(values, name).values, splits)


def _dense(array: np.ndarray, name: str) -> Column:
    if array.ndim == 0:
        raise DataError(f"{name} is a single value, {array!r}.", hint="one row for each example is needed")
    if array.dtype.kind in "SU":
        array = array.astype(object)
    elif array.dtype.kind not in "biufcO" and array.dtype.name != "bfloat16":
        raise DataError(f"{name} is of type {array.dtype}.", hint="give numbers or texts")
    return Column(array)


def _tensor(column: Column) -> Any:
    values = tf.convert_to_tensor(column.values)
    if column.splits is None:
        return values
    return tf.RaggedTensor.from_row_splits(values, tf.convert_to_tensor(column.splits), validate=False)
