"""Writes examples to record files: each a `tf.train.Example`, in as many files as wanted.

A file gets its name when it is whole. Reading them back is `records.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.data.columns import Column, columns_of, named_columns
from dtrain.data.records import array_record_module
from dtrain.data.tfrecord_files import check_compression
from dtrain.errors import ConfigurationError, DataError


def write_tfrecords(
    examples: Any, path_pattern: str | os.PathLike[str], shards: int = 1, *, compression: str | None = None
) -> list[str]:
    """Writes examples to TFRecord files.

    Integers and booleans become int64 lists, floats float lists (float32), texts bytes lists. A feature is
    called as the field or key, or as the number of the array in a tuple.

    Args:
        examples: arrays as a `Pipeline` takes them.
        path_pattern: where to; a `*` in it becomes `00000-of-00004`. Without one the number goes before the
            suffix, where there are several files.
        shards: how many files; each gets a run of examples that follow each other.
        compression: None, "GZIP" or "ZLIB".

    Returns:
        The paths, in order.

    Raises:
        DataError: the examples do not fit together, or cannot be written as features.
        ConfigurationError: shards is not at least 1, or the compression is not known.
    """
    options = tf.io.TFRecordOptions(compression_type=check_compression(compression))
    return _write(examples, path_pattern, shards, lambda path: tf.io.TFRecordWriter(path, options))


def write_array_records(examples: Any, path_pattern: str | os.PathLike[str], shards: int = 1) -> list[str]:
    """Writes examples to array-record files; as `write_tfrecords`.

    Raises:
        UnsupportedVersionError: the package array-record is not installed.
        DataError, ConfigurationError: as there.
    """
    module = array_record_module()
    # Groups of one: a single record can then be read without its neighbours.
    return _write(examples, path_pattern, shards, lambda path: module.ArrayRecordWriter(path, "group_size:1"))


def record_features(examples: Any) -> dict[str, Any]:
    """The features to read back what the writers write.

    Args:
        examples: arrays as a `Pipeline` takes them, or some of them.
    """
    return {name: _feature(column) for name, column in named_columns(columns_of(examples))}


def _write(examples: Any, pattern: Any, shards: int, open_writer: Callable[[str], Any]) -> list[str]:
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ConfigurationError(
            f"shards={shards!r} is not a number of files.", hint="an integer of at least 1"
        )
    columns = list(named_columns(columns_of(examples)))
    for name, column in columns:
        _check_writable(column, name)
    count = columns[0][1].examples
    paths = _paths(os.fspath(pattern), shards)
    for shard, path in enumerate(paths):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        partial = f"{path}.partial"
        writer = open_writer(partial)
        try:
            for row in range(shard * count // shards, (shard + 1) * count // shards):
                writer.write(_serialized(columns, row))
        finally:
            writer.close()
        Path(partial).replace(path)
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
