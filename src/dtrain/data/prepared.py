"""Reads one split of a data set, as NumPy values, from the folder in which tensorflow-datasets prepared it.

It downloads and prepares nothing. It runs no TensorFlow operation, so a strategy can still be made
afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from dtrain.errors import DataError, UnsupportedVersionError


def read_split(
    folder: Path, name: str, split: str, fields: Sequence[str], limit: int | None
) -> dict[str, list[Any]]:
    """Read some fields of a split, in the order of its files.

    Args:
        folder: the folder of one version, with `dataset_info.json`.
        name: the expected name of the data set.
        split: name of the split, such as `train`.
        fields: the features to read.
        limit: read at most this many examples; None reads all.

    Returns:
        For each field the values, each as tensorflow-datasets decodes it: arrays, integers, bytes.

    Raises:
        UnsupportedVersionError: a package that is needed to read the folder is not installed.
        DataError: the folder is damaged or incomplete, or holds another data set.
    """
    builder = _builder(folder)
    info = builder.info
    missing = [field for field in fields if field not in info.features]
    if info.name != name or split not in info.splits or missing:
        raise DataError(
            f"{folder} holds {info.name!r} with the splits {list(info.splits)} and the features "
            f"{list(info.features)}; looked for {name!r}, {split!r} and {list(fields)}.",
            hint="Give the folder of the data set itself, prepared in its usual form.",
        )
    promised = info.splits[split].num_examples
    columns: dict[str, list[Any]] = {field: [] for field in fields}
    try:
        with _without_advice():
            for example in islice(_examples(builder, split), limit):
                for field in fields:
                    columns[field].append(example[field])
    except ImportError as error:
        raise _not_installed(folder, error) from error
    except Exception as error:  # each file format has errors of its own
        raise DataError(
            f"The split {split!r} in {folder} cannot be read: {type(error).__name__}: {error}.",
            hint="A file is missing, cut off or damaged: prepare the data set again.",
        ) from error
    found = len(columns[fields[0]])
    if found != (promised if limit is None else min(limit, promised)):
        raise DataError(
            f"The split {split!r} in {folder} should have {promised} examples, but {found} could be read.",
            hint="A file is cut off: prepare the data set again.",
        )
    return columns


def _builder(folder: Path) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise _not_installed(folder, error) from error
    try:
        return tfds.builder_from_directory(folder)
    except Exception as error:  # the class of error depends on which file is damaged
        raise DataError(
            f"{folder} is no prepared data set: {type(error).__name__}: {error}.",
            hint="Prepare it again with tensorflow-datasets.",
        ) from error


def _examples(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    if builder.info.file_format.value != "tfrecord":
        yield from builder.as_data_source(split=split)
        return
    # The usual way, `as_dataset`, initialises TensorFlow's devices; many strategies cannot be made after it.
    import tensorflow as tf

    for file in builder.info.splits[split].filepaths:
        for record in tf.compat.v1.io.tf_record_iterator(str(file)):
            yield builder.info.features.deserialize_example_np(record)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silences TensorFlow's warnings about deprecated readers and faster image libraries."""
    loggers = [logging.getLogger(name) for name in ("tensorflow", "absl")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _not_installed(folder: Path, error: ImportError) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{folder} was prepared by tensorflow-datasets, and what reads it cannot be imported: {error}.",
        hint="Install it: pip install 'dtrain[data]'. The authors' own archive needs no such package.",
    )
