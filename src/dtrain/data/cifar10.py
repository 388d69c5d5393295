"""CIFAR-10: 60000 real colour photographs in ten classes, from the files that its authors publish.

It reads both published archives and the folders that tensorflow-datasets prepares. It downloads nothing and
does not scale pixels.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.data import prepared
from dtrain.data.archives import ArchiveFiles, by_number, open_files
from dtrain.data.checksums import PublishedArchive
from dtrain.data.digits import Examples
from dtrain.data.published import Located, Published, check_labels, listing, locate
from dtrain.data.unpickling import load_arrays
from dtrain.errors import DataError
from dtrain.log import logger
from dtrain.plain_text import cleaned

_PIXELS = 3 * 32 * 32
_CLASSES = 10
_FULL_BATCH = 10_000
_TRAINING_BATCHES = 5
_BATCH_FILE = re.compile(r"(data_batch_([1-9][0-9]{0,5})|test_batch)(\.bin)?")


class Cifar10(NamedTuple):
    """The training and the test images, as the authors divided them; no image is in both.

    Attributes:
        train: 50000 images, uint8 of shape (n, 32, 32, 3), red, green and blue from 0 to 255; labels int64 of
            shape (n,), from 0 to 9.
        test: 10000 images and labels of the same types.
    """

    train: Examples
    test: Examples


_PUBLISHED = Published(
    title="CIFAR-10",
    archives=(
        PublishedArchive(
            "cifar-10-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            170_498_071,
            "c58f30108f718f92721af3b95e74349a",
        ),
        PublishedArchive(
            "cifar-10-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    folders=(
        "cifar-10-batches-py",
        "cifar-10-batches-bin",
        "cifar-10-batches-py-target/cifar-10-batches-py",  # as Keras unpacks it
    ),
    prepared="cifar10",
    is_folder=lambda folder: any(_BATCH_FILE.fullmatch(entry.name) for entry in folder.iterdir()),
)


def load_cifar10(
    path: str | os.PathLike[str] | None = None, *, limit: int | None = None, checksum: str | None = None
) -> Cifar10:
    """Load CIFAR-10, in the order of its files; that order is the same on every machine.

    Args:
        path: one of `cifar-10-python.tar.gz` or `cifar-10-binary.tar.gz` (also as `.tgz` or `.tar`); the
            folder `cifar-10-batches-py` or `cifar-10-batches-bin` that they extract to; a folder that
            tensorflow-datasets prepared; or the folder that contains one of these. None looks in
            `DTRAIN_DATA_DIR` (`data` in the current folder if it is not set) and in `~/.keras/datasets`.
        limit: load at most this many images of each part.
        checksum: the archive's expected sum, as `md5:<digits>` or `sha256:<digits>`. Two more sums are
            always compared: the published sum if the archive has the published size, and the sum in a file
            such as `<archive>.md5` beside it.

    Returns:
        `Cifar10(train, test)`; smaller archives in the same format give fewer images.

    Raises:
        DataError: the data is missing, cut off, damaged, or of another data set.
        ConfigurationError: `limit` or `checksum` is malformed, or `checksum` was given for a folder.
        UnsupportedVersionError: the folder was prepared by tensorflow-datasets, which is not installed.
    """
    found = locate(_PUBLISHED, path, checksum, limit)
    data = _from_prepared(found.path, limit) if found.form == "prepared" else _from_batches(found, limit)
    logger.info("CIFAR-10: %d + %d images from %s", len(data.train.labels), len(data.test.labels), found.path)
    return data


def _from_batches(found: Located, limit: int | None) -> Cifar10:
    with open_files(found.path) as files:
        train, test = _batch_files(files.names(), found.path)
        data = Cifar10(
            train=_joined(files, train, found.path, limit), test=_joined(files, test, found.path, limit)
        )
    if len(train) < _TRAINING_BATCHES and len(data.train.labels) == len(train) * _FULL_BATCH:
        logger.warning(
            "%s has %d of the %d training batches that are published.",
            found.path,
            len(train),
            _TRAINING_BATCHES,
        )
    return data


def _joined(files: ArchiveFiles, names: list[str], path: Path, limit: int | None) -> Examples:
    """Concatenate the images of the batch files; reads no more files than `limit` needs."""
    batches: list[Examples] = []
    # Without a limit all files are read in one call, so that the archive is decompressed once.
    for group in [names] if limit is None else [[name] for name in names]:
        if limit is None or sum(len(batch.labels) for batch in batches) < limit:
            for name, raw in files.read(group):
                batches.append(_parse(raw, f"{cleaned(name)} in {path}", binary=name.endswith(".bin")))
    images, labels = (np.concatenate(arrays)[:limit] for arrays in zip(*batches, strict=True))
    return Examples(images, labels)


def _batch_files(names: list[str], path: Path) -> tuple[list[str], list[str]]:
    """The names of the training batches, in order, and of the test batch."""
    found = [(match, name) for name in names if (match := _BATCH_FILE.fullmatch(name.rpartition("/")[2]))]
    # If a folder holds both formats, the binary one is read: it is simpler than pickles.
    binary = any(match[3] for match, _ in found)
    kept = [(match, name) for match, name in found if bool(match[3]) == binary]
    train = sorted((name for match, name in kept if match[2]), key=lambda name: by_number(Path(name).name))
    test = [name for match, name in kept if not match[2]]
    if not train or not test:
        lacking = "training batches (data_batch_1, ...)" if not train else "test batch (test_batch)"
        raise DataError(
            f"{path} has no CIFAR-10 {lacking}; it holds {listing(names)}.",
            hint=f"What is read is laid out as {_PUBLISHED.archives[0].url} is.",
        )
    numbers = [int(match[2]) for match, _ in kept if match[2]]
    if sorted(numbers) != list(range(1, len(numbers) + 1)) or len(test) > 1:
        raise DataError(
            f"{path} should hold the batches 1, 2, ... and one of test, each once; it holds "
            f"{listing(train + test)}.",
            hint="Unpack the archive again into an empty folder, or give the archive itself.",
        )
    return train, test


def _parse(raw: bytes, where: str, *, binary: bool) -> Examples:
    rows, labels = _binary_records(raw, where) if binary else _pickled_batch(raw, where)
    check_labels(labels, _CLASSES, where)
    # Stored channels first; Keras on TensorFlow trains on channels last.
    images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Examples(np.ascontiguousarray(images), labels)


def _binary_records(raw: bytes, where: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    size = 1 + _PIXELS
    if not raw or len(raw) % size:
        raise DataError(
            f"{where} has {len(raw)} bytes, no multiple of {size} (a label and {_PIXELS} pixels).",
            hint="The file is cut off, or of another data set: fetch it again.",
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _pickled_batch(raw: bytes, where: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    try:
        # The published files, written by Python 2, have bytes as keys; a newer file may have text.
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in load_arrays(raw).items()}
        data, labels = _array(fields.get("data")), _array(fields.get("labels"))
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{where} is no pickle of arrays by name: {type(error).__name__}: {cleaned(error)}.",
            hint="It is damaged or something else; nothing but arrays, lists and text is ever unpickled.",
        ) from error
    good = data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == _PIXELS and len(data) > 0
    names = sorted(name for name in fields if isinstance(name, str))
    if not (good and labels.dtype.kind in "iu" and labels.shape == (len(data),)):
        raise DataError(
            f"{where} has the fields {listing(names)}, with data {data.dtype}"
            f"{list(data.shape)} and labels {labels.dtype}{list(labels.shape)}; a batch has data "
            f"uint8[n, {_PIXELS}] and n integers as labels.",
            hint="The file is damaged, or of another data set.",
        )
    return data, labels.astype(np.int64)


def _array(field: Any) -> NDArray[Any]:
    """A field as an array. A list may hold integers only: nested lists could make an array of any size."""
    if isinstance(field, list) and not all(isinstance(each, int | np.integer) for each in field):
        raise ValueError("it holds a list of something else than whole numbers")
    return np.asarray(field)


def _from_prepared(folder: Path, limit: int | None) -> Cifar10:
    def part(split: str) -> Examples:
        columns = prepared.read_split(folder, "cifar10", split, ("image", "label"), limit)
        rows = np.stack(columns["image"])
        if rows.dtype != np.uint8 or rows.shape[1:] != (32, 32, 3):
            raise DataError(
                f"{folder} holds images {rows.dtype}{list(rows.shape[1:])}, not uint8[32, 32, 3].",
                hint="It is of another data set.",
            )
        labels = np.asarray(columns["label"], np.int64)
        check_labels(labels, _CLASSES, f"{folder}, split {split},")
        return Examples(rows, labels)

    return Cifar10(train=part("train"), test=part("test"))
