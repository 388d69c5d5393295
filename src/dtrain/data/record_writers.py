"""Writes examples to record files, each example as a `tf.train.Example`.

A file gets its final name only when it is complete. This module does not read files; `records.py` does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base import safe_files
from dtrain.base.words import whole_number
from dtrain.data.columns import Column, columns_of, named_columns
from dtrain.data.records import array_record_module
from dtrain.data.tfrecord_files import check_compression
from dtrain.errors import DataError


def write_tfrecords(
    examples: Any, path_pattern: str | os.PathLike[str], shards: int = 1, *, compression: str | None = None
) -> list[str]:
    """Writes examples to TFRecord files.

    Integers and booleans become int64 lists, floats become float lists (float32), texts become bytes lists. A
    feature has the name of the field or key, or the number of the array in a tuple.

    Args:
        examples: arrays as a `Pipeline` takes them.
        path_pattern: path of the files; a `*` in it becomes the number, such as `00000-of-00004`. Without a
            `*`, the number of one of several files goes before the suffix.
        shards: number of files; each gets consecutive examples.
        compression: None, "GZIP" or "ZLIB".

    Returns:
        The paths, in order.

    Raises:
        DataError: the examples do not fit together, or cannot be written as features.
        ConfigurationError: `shards` is not an integer of at least 1, or the compression is not known.

    Example:
        ```python
        values = dtrain.data.synthetic_values(100)
        paths = dtrain.data.write_tfrecords(values, "values-*.tfrecord", shards=2)
        print(paths)  # ['values-00000-of-00002.tfrecord', 'values-00001-of-00002.tfrecord']
        ```
    """
    options = tf.io.TFRecordOptions(compression_type=check_compression(compression))
    return _write(examples, path_pattern, shards, lambda path: tf.io.TFRecordWriter(path, options))


def write_array_records(examples: Any, path_pattern: str | os.PathLike[str], shards: int = 1) -> list[str]:
    """Writes examples to array-record files. Arguments and result are those of `write_tfrecords`.

    Raises:
        UnsupportedVersionError: the package array-record is not installed.
        DataError: the examples do not fit together, or cannot be written as features.
        ConfigurationError: `shards` is not an integer of at least 1.

    Example:
        ```python
        values = dtrain.data.synthetic_values(100)
        dtrain.data.write_array_records(values, "values.array_record")
        ```
    """
    module = array_record_module()
    # Groups of one record: a single record can then be read without its neighbours.
    return _write(examples, path_pattern, shards, lambda path: module.ArrayRecordWriter(path, "group_size:1"))


def record_features(examples: Any) -> dict[str, Any]:
    """The features with which `tfrecords` and `array_records` read what these writers wrote.

    Args:
        examples: arrays as a `Pipeline` takes them; some of the rows are enough, if
            ragged columns are still ragged among them.

    Returns:
        For each feature name a `tf.io.FixedLenFeature`, or a `tf.io.RaggedFeature` if the column is ragged.

    Raises:
        DataError: the examples do not fit together.
        ConfigurationError: `examples` is of another kind.

    Example:
        ```python
        values = dtrain.data.synthetic_values(100)
        print(dtrain.data.record_features(values))  # {'inputs': FixedLenFeature(shape=[10], ...
        ```
    """
    return {name: _feature(column) for name, column in named_columns(columns_of(examples))}


def _write(examples: Any, pattern: Any, shards: int, open_writer: Callable[[str], Any]) -> list[str]:
    shards = whole_number(shards, "shards", 1)
    columns = list(named_columns(columns_of(examples)))
    for name, column in columns:
        _check_writable(column, name)
    count = columns[0][1].examples
    paths = _paths(os.fspath(pattern), shards)
    for shard, path in enumerate(paths):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        partial = f"{path}.{secrets.token_hex(8)}.partial"  # a link may be at a name that can be foreseen
        try:
            writer = open_writer(partial)
            try:
                for row in range(shard * count // shards, (shard + 1) * count // shards):
                    writer.write(_serialized(columns, row))
            finally:
                writer.close()
            Path(partial).replace(path)
        finally:
            safe_files.remove(partial, ignore_errors=True)
    return paths


def _paths(pattern: str, shards: int) -> list[str]:
    if "*" not in pattern:
        if shards == 1:
            return [pattern]
        stem, dot, suffix = Path(pattern).name.partition(".")
        pattern = str(Path(pattern).with_name(f"{stem}-*{dot}{suffix}"))
    return [pattern.replace("*", f"{shard:05d}-of-{shards:05d}") for shard in range(shards)]


def _serialized(columns: list[tuple[str, Column]], row: int) -> bytes:
    features = {name: _list_of(_row(column, row)) for name, column in columns}
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def _row(column: Column, row: int) -> Any:
    if column.splits is None:
        return column.values[row : row + 1]
    return column.values[column.splits[row] : column.splits[row + 1]]


def _list_of(values: Any) -> Any:
    kind = values.dtype.kind
    flat = values.reshape(-1)
    if kind in "biu":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=flat.astype(np.int64)))
    if kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=flat.astype(np.float32)))
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in flat]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))


def _feature(column: Column) -> Any:
    kind = column.values.dtype.kind
    dtype = tf.int64 if kind in "biu" else tf.float32 if kind == "f" else tf.string
    if column.splits is None:
        return tf.io.FixedLenFeature(list(column.values.shape[1:]), dtype)
    return tf.io.RaggedFeature(dtype)


def _check_writable(column: Column, name: str) -> None:
    values = column.values
    if values.dtype.kind not in "biufO":
        raise DataError(
            f"{name} is of type {values.dtype}, for which there is no feature.", hint="cast it first"
        )
    if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"{name} has numbers above 2**63 - 1, the largest of a feature.", hint="cast it first"
        )
    if column.splits is not None and values.ndim > 1:
        raise DataError(
            f"{name} is ragged, and of {values.ndim} dimensions.", hint="only vectors may be ragged"
        )
