"""Examples in record files, TFRecord or array-record: which files, how many in each, how to parse one.

All files are looked through when they are named, so that what is missing or damaged is known before
training; reading them is done by the pipeline.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.data.tfrecord_files import check_compression, scan
from dtrain.errors import ConfigurationError, DataError, UnsupportedVersionError

# A reader of its own for each file, without threads of its own: the pipeline has threads enough.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_KINDS = {"bytes_list": tf.string, "int64_list": tf.int64, "float_list": tf.float32}


@dataclass(frozen=True)
class Records:
    """Record files as a source; made by `tfrecords` and `array_records`.

    Attributes:
        files: their paths, in order.
        counts: examples in each.
        parse: makes an example of a serialized record (a string scalar) and its name for messages.
        random_access: whether single records can be fetched.
        compression: of the records: "", "GZIP" or "ZLIB".
        record_bytes: size of a record in the mean, decompressed; 0: not known.
    """

    files: tuple[str, ...]
    counts: tuple[int, ...]
    parse: Callable[[Any, Any], Any]
    random_access: bool
    compression: str = ""
    record_bytes: float = 0.0

    @property
    def examples(self) -> int:
        """How many there are in all files."""
        return sum(self.counts)


def tfrecords(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    features: Mapping[str, Any],
    *,
    compression: str | None = None,
) -> Records:
    """TFRecord files of `tf.train.Example`s.

    Every file is looked through from record to record: quickly, by the records' lengths, where it is not
    compressed; the first and the last record of each are compared with `features`.

    Args:
        files: a pattern such as `data/train-*.tfrecord`, or paths.
        features: what `tf.io.parse_single_example` takes: names, and `tf.io.FixedLenFeature`,
            `VarLenFeature` or `RaggedFeature`. Variable-length features of one dimension become vectors.
        compression: None, "GZIP" or "ZLIB".

    Returns:
        A source of dictionaries with one entry a feature.

    Raises:
        DataError: there is no such file, one is damaged (it names the file and the record), all are
            empty, or a record does not have the features.
        ConfigurationError: the compression is not known.
    """
    compression = check_compression(compression)
    if not isinstance(features, Mapping) or not features:
        raise ConfigurationError(
            f"features={features!r} names no features.",
            hint='a dictionary such as {"x": tf.io.FixedLenFeature([4], tf.float32)}',
        )
    found = _found(files)
    with ThreadPoolExecutor(max_workers=8) as pool:
        scanned = list(pool.map(lambda path: scan(path, compression), found))
    counts = tuple(count for count, *_ in scanned)
    _check_not_empty(found, counts)
    for path, (count, first, last, _) in zip(found, scanned, strict=True):
        for number, record in ((0, first), (count - 1, last)):
            if record is not None:
                _check_features(record, features, f"Record {number} of {path}")
    size = sum(length for *_, length in scanned) / sum(counts)
    return Records(found, counts, _example_parser(features), False, compression, size)


def array_records(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    parse: Callable[[Any], Any] | Mapping[str, Any],
) -> Records:
    """Array-record files, whose records can be fetched one by one.

    Args:
        files: a pattern such as `data/train-*.array_record`, or paths.
        parse: a function of TensorFlow operations that makes an example of a serialized record (a string
            scalar), or the features of a `tf.train.Example`, as for `tfrecords`.

    Raises:
        UnsupportedVersionError: the package array-record is not installed.
        DataError: there is no such file, one cannot be read, all are empty, or the first or last record of
            one is damaged or does not have the features.
    """
    found = _found(files)
    counts = tuple(map(_array_record_count, found))
    _check_not_empty(found, counts)
    if isinstance(parse, Mapping):
        for path, count in zip(found, counts, strict=True):
            for number, record in _first_and_last(path, count):
                _check_features(record, parse, f"Record {number} of {path}")
        return Records(found, counts, _example_parser(parse), True)
    if not callable(parse):
        raise ConfigurationError(
            f"parse is a {type(parse).__name__}.", hint="a function of a serialized record, or its features"
        )
    given = parse
    return Records(found, counts, lambda serialized, name: given(serialized), True)


def open_array_record(path: str) -> Any:
    """A reader of an array-record file.

    Raises:
        UnsupportedVersionError: the package is not installed.
        DataError: the file cannot be read.
    """
    reader = array_record_module().ArrayRecordReader(path, _READER_OPTIONS)
    if not reader.ok():
        raise DataError(
            f"{path} is no array-record file, or is cut off or damaged.", hint="copy or write the file again"
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


def _array_record_count(path: str) -> int:
    reader = open_array_record(path)
    try:
        return int(reader.num_records())
    finally:
        reader.close()


def _first_and_last(path: str, count: int) -> list[tuple[int, bytes]]:
    """The first and the last record of an array-record file, each with its number.

    Raises:
        DataError: one of them is damaged.
    """
    found = []
    reader = open_array_record(path)
    try:
        for number in sorted({0, count - 1}) if count else ():
            try:
                found.append((number, reader.read([number])[0]))
            except Exception as error:  # what array-record raises differs by the damage
                raise DataError(
                    f"Record {number} of {path} is damaged: {error}.", hint="copy or write the file again"
                ) from error
    finally:
        reader.close()
    return found


def _found(files: Any) -> tuple[str, ...]:
    """The files that are meant; those of a pattern in the order of their names.

    Raises:
        DataError: there is none, or one of a list is not there.
    """
    if isinstance(files, str | os.PathLike):
        pattern = os.fspath(files)
        remote = "://" in pattern
        found = sorted(tf.io.gfile.glob(pattern) if remote else glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not found:
            raise DataError(f"No file is called {pattern}.", hint=f"looked from {os.getcwd()}")  # noqa: PTH109
        return tuple(found)
    found = [os.fspath(file) for file in files]
    if not found:
        raise DataError("The list of record files is empty.", hint="give paths, or a pattern")
    missing = [file for file in found if not tf.io.gfile.exists(file)]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(found)} record files are missing: {', '.join(missing[:3])}.",
            hint=f"looked from {os.getcwd()}",  # noqa: PTH109
        )
    if len(set(found)) < len(found):
        twice = next(file for file in found if found.count(file) > 1)
        raise DataError(
            f"{twice} is listed twice.", hint="name every file once: its examples would count twice"
        )
    return tuple(found)


def _check_not_empty(files: tuple[str, ...], counts: tuple[int, ...]) -> None:
    if sum(counts) == 0:
        raise DataError(
            f"There is no record in {len(files)} files, such as {files[0]}.",
            hint="look at how they were written",
        )


def _example_parser(features: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """Parses a `tf.train.Example`; a record that does not fit is named in TensorFlow's error."""
    wanted = dict(features)

    def parse(serialized: Any, name: Any) -> dict[str, Any]:
        # As a batch of one: TensorFlow names the record in its error only there.
        found = tf.io.parse_example(serialized[None], wanted, example_names=name[None])
        return {key: _as_vector(value) for key, value in found.items()}

    return parse


def _as_vector(value: Any) -> Any:
    dense = tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value
    return dense[0]


def _check_features(record: bytes, features: Mapping[str, Any], where: str) -> None:
    """Compares a record with the features that it should have.

    Raises:
        DataError: saying what the record has instead.
    """
    try:
        present = dict(tf.train.Example.FromString(record).features.feature)
    except Exception as error:  # protobuf's own class of error differs by its implementation
        raise DataError(
            f"{where} is no tf.train.Example: {error}.", hint="array_records(...) takes a parse function"
        ) from error
    for name, wanted in features.items():
        key = getattr(wanted, "key", None) or name
        kind = present[key].WhichOneof("kind") if key in present else None
        if kind is None:
            if isinstance(wanted, tf.io.FixedLenFeature) and wanted.default_value is None:
                held = ", ".join(sorted(present)) or "nothing"
                raise DataError(f"{where} has no feature {key!r}; it has {held}.", hint="name what it has")
            continue
        values = getattr(present[key], kind).value
        if len(values) and wanted.dtype != _KINDS[kind]:
            raise DataError(
                f"{where} holds {_KINDS[kind].name} in the feature {key!r}, not "
                f"{tf.as_dtype(wanted.dtype).name}.",
                hint=f"say {_KINDS[kind].name}; cast it in transform",
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
