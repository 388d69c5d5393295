"""Record files as a source, TFRecord or array-record: their paths, the examples in each, how to parse one.

All files are checked when the source is made, so that missing or damaged files are found before training. The
examples themselves are read by the pipeline, not here.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.base import safe_files
from dtrain.data.tfrecord_files import check_compression, scan
from dtrain.errors import ConfigurationError, DataError, UnsupportedVersionError

# Each file has its own reader, which starts no threads: the pipeline already reads in parallel.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_KINDS = {"bytes_list": tf.string, "int64_list": tf.int64, "float_list": tf.float32}


@dataclass(frozen=True)
class Records:
    """Record files as a source; made by `tfrecords` and `array_records`.

    Attributes:
        files: their paths, in order.
        counts: number of examples in each file.
        parse: makes an example from a serialized record (a string scalar) and the record's name for messages.
        random_access: whether records can be fetched in any order.
        compression: "", "GZIP" or "ZLIB".
        record_bytes: mean size of a decompressed record; 0 if not known.

    Example:
        ```python
        values = dtrain.data.synthetic_values(100)
        features = dtrain.data.record_features(values)
        records = dtrain.data.tfrecords(dtrain.data.write_tfrecords(values, "values.tfrecord"), features)
        print(records.counts)  # (100,)
        ```
    """

    files: tuple[str, ...]
    counts: tuple[int, ...]
    parse: Callable[[Any, Any], Any]
    random_access: bool
    compression: str = ""
    record_bytes: float = 0.0

    @property
    def examples(self) -> int:
        """The number of examples in all files."""
        return sum(self.counts)


def tfrecords(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    features: Mapping[str, Any],
    *,
    compression: str | None = None,
) -> Records:
    """TFRecord files of `tf.train.Example`s as a source.

    Every file is scanned from record to record to count them. An uncompressed file is scanned quickly, by the
    lengths of its records. The first and the last record of each file are compared with `features`.

    Args:
        files: a pattern such as `data/train-*.tfrecord`, or paths.
        features: as for `tf.io.parse_single_example`: for each name a `tf.io.FixedLenFeature`,
            `VarLenFeature` or `RaggedFeature`. Variable-length features of one dimension become vectors.
        compression: None, "GZIP" or "ZLIB".

    Returns:
        A source of dictionaries with one entry a feature.

    Raises:
        DataError: a file is missing, listed twice or damaged (the message names the file and the record), all
            files are empty, or a record does not have the features.
        ConfigurationError: the compression is not known, or `features` is no dictionary or an empty one.

    Example:
        ```python
        values = dtrain.data.synthetic_values(100)
        dtrain.data.write_tfrecords(values, "values-*.tfrecord", shards=2)
        records = dtrain.data.tfrecords("values-*.tfrecord", dtrain.data.record_features(values))
        pipeline = dtrain.data.Pipeline(
            records, batch=10, transform=lambda example: (example["inputs"], example["targets"])
        )
        ```
    """
    compression = check_compression(compression)
    if not isinstance(features, Mapping) or not features:
        raise ConfigurationError(
            f"features={features!r} names no features.",
            hint='a dictionary such as {"x": tf.io.FixedLenFeature([4], tf.float32)}',
        )
    paths = _found(files)
    with ThreadPoolExecutor(max_workers=8) as pool:
        scanned = list(pool.map(lambda path: scan(path, compression), paths))
    counts = _checked(paths, [result[:3] for result in scanned], features)
    size = sum(length for *_, length in scanned) / sum(counts)
    return Records(paths, counts, _example_parser(features), False, compression, size)


def array_records(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    parse: Callable[[Any], Any] | Mapping[str, Any],
) -> Records:
    """Array-record files as a source; their records can be fetched in any order.

    Args:
        files: a pattern such as `data/train-*.array_record`, or paths.
        parse: a function of TensorFlow operations that makes an example from a serialized record (a string
            scalar); or the features of a `tf.train.Example`, as for `tfrecords`.

    Raises:
        UnsupportedVersionError: the package array-record is not installed.
        DataError: a file is missing, listed twice or unreadable, its first or last record is damaged or does
            not have the features, or all files are empty.
        ConfigurationError: `parse` is neither a function nor a dictionary of features.

    Example:
        ```python
        values = dtrain.data.synthetic_values(100)
        dtrain.data.write_array_records(values, "values.array_record")
        records = dtrain.data.array_records("values.array_record", dtrain.data.record_features(values))
        print(records.examples)  # 100
        ```
    """
    paths = _found(files)
    if isinstance(parse, Mapping):
        counts = _checked(paths, list(map(_scanned_array_record, paths)), parse)
        return Records(paths, counts, _example_parser(parse), True)
    if not callable(parse):
        raise ConfigurationError(
            f"parse is a {type(parse).__name__}.", hint="a function of a serialized record, or its features"
        )
    given, counts = parse, _checked(paths, list(map(_scanned_array_record, paths)), {})
    return Records(paths, counts, lambda serialized, name: given(serialized), True)


def open_array_record(path: str) -> Any:
    """A reader of an array-record file.

    Raises:
        UnsupportedVersionError: the package array-record is not installed.
        DataError: the file cannot be read.
    """
    module = array_record_module()
    try:
        safe_files.check_regular(path)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}."
        raise DataError(problem, hint="look at its name and rights") from error
    reader = module.ArrayRecordReader(path, _READER_OPTIONS)
    if not reader.ok():
        raise DataError(
            f"{path} is not an array-record file, or is incomplete or damaged.",
            hint="copy or write the file again",
        )
    return reader


def array_record_module() -> Any:
    """The module that reads and writes array-record files.

    Raises:
        UnsupportedVersionError: it is not installed.
    """
    try:
        return importlib.import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise UnsupportedVersionError(
            f"Array-record files need the package array-record, which cannot be imported: {error}.",
            hint="Install it: pip install 'dtrain[data]'",
        ) from error


def _scanned_array_record(path: str) -> tuple[int, bytes | None, bytes | None]:
    """The number of records of an array-record file, its first and its last record; None without records.

    Raises:
        DataError: one of the two is damaged.
    """
    reader = open_array_record(path)
    count, number = int(reader.num_records()), 0
    ends: list[bytes | None] = []
    try:
        for number in (0, count - 1):
            ends.append(reader.read([number])[0] if count else None)
    except Exception as error:  # the class of array-record's error depends on the damage
        raise DataError(
            f"Record {number} of {path} is damaged: {error}.", hint="copy or write the file again"
        ) from error
    finally:
        reader.close()
    return count, ends[0], ends[1]


def _found(files: Any) -> tuple[str, ...]:
    """The paths of the files; a pattern gives them in the order of their names.

    Raises:
        DataError: there is no file, or a listed file is missing or listed twice.
    """
    if isinstance(files, str | os.PathLike):
        pattern = os.fspath(files)
        remote = "://" in pattern
        paths = sorted(tf.io.gfile.glob(pattern) if remote else glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not paths:
            raise DataError(f"No file is called {pattern}.", hint=f"looked from {os.getcwd()}")  # noqa: PTH109
        return tuple(paths)
    paths = [os.fspath(file) for file in files]
    if not paths:
        raise DataError("The list of record files is empty.", hint="give paths, or a pattern")
    missing = [file for file in paths if not tf.io.gfile.exists(file)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} record files are missing: {', '.join(missing[:3])}.",
            hint=f"looked from {os.getcwd()}",  # noqa: PTH109
        )
    if len(set(paths)) < len(paths):
        twice = next(file for file in paths if paths.count(file) > 1)
        raise DataError(
            f"{twice} is listed twice.", hint="name every file once: its examples would count twice"
        )
    return tuple(paths)


def _checked(
    files: Sequence[str],
    scanned: Sequence[tuple[int, bytes | None, bytes | None]],
    features: Mapping[str, Any],
) -> tuple[int, ...]:
    """The number of records of each file.

    Args:
        files: the paths of the files.
        scanned: for each file the number of its records, the first and the last one.
        features: what these two should have.

    Raises:
        DataError: no file has a record, or a record does not have the features.
    """
    counts = tuple(count for count, _, _ in scanned)
    if sum(counts) == 0:
        raise DataError(
            f"There is no record in {len(files)} files, such as {files[0]}.",
            hint="look at how they were written",
        )
    for path, (count, first, last) in zip(files, scanned, strict=True):
        for number, record in ((0, first), (count - 1, last)):
            if record is not None and features:
                _check_features(record, features, f"Record {number} of {path}")
    return counts


def _example_parser(features: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """Makes a parser of `tf.train.Example`s; TensorFlow's error names a record that does not fit."""
    wanted = dict(features)

    def parse(serialized: Any, name: Any) -> dict[str, Any]:
        # Parsed as a batch of one: only then does TensorFlow name the record in its error.
        parsed = tf.io.parse_example(serialized[None], wanted, example_names=name[None])
        return {key: _as_vector(value) for key, value in parsed.items()}

    return parse


def _as_vector(value: Any) -> Any:
    dense = tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value
    return dense[0]


def _check_features(record: bytes, features: Mapping[str, Any], where: str) -> None:
    """Compares a record with the features that it should have.

    Raises:
        DataError: they differ; the message says what the record has instead.
    """
    try:
        present = dict(tf.train.Example.FromString(record).features.feature)
    except Exception as error:  # the class of protobuf's error depends on its implementation
        raise DataError(
            f"{where} is not a tf.train.Example: {error}.", hint="array_records(...) takes a parse function"
        ) from error
    for name, wanted in features.items():
        key = getattr(wanted, "key", None) or name
        kind = present[key].WhichOneof("kind") if key in present else None
        if kind is None:
            if isinstance(wanted, tf.io.FixedLenFeature) and wanted.default_value is None:
                held = ", ".join(sorted(present)) or "nothing"
                raise DataError(
                    f"{where} has no feature {key!r}; it has {held}.", hint="name a feature that it has"
                )
            continue
        values = getattr(present[key], kind).value
        if len(values) and wanted.dtype != _KINDS[kind]:
            raise DataError(
                f"{where} holds {_KINDS[kind].name} in the feature {key!r}, not "
                f"{tf.as_dtype(wanted.dtype).name}.",
                hint=f"use {_KINDS[kind].name}, and cast it in transform",
            )
        if isinstance(wanted, tf.io.FixedLenFeature):
            _check_count(values, wanted, f"{where} has {len(values)} values in the feature {key!r}")


def _check_count(values: Any, wanted: Any, found: str) -> None:
    size = tf.TensorShape(wanted.shape).num_elements()
    if len(values) != size and not (len(values) == 0 and wanted.default_value is not None):
        raise DataError(
            f"{found}, but its shape {list(wanted.shape)} needs {size}.",
            hint="tf.io.RaggedFeature or VarLenFeature is for features of other lengths",
        )
