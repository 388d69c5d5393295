"""CIFAR-10: 60000 real colour photographs in ten classes, from the files that its authors publish.

It reads the archive for Python, and does not scale pixels.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.base.log import logger
from dtrain.base.plain_text import cleaned
from dtrain.data.archives import Archive, by_number, open_archive
from dtrain.data.digits import Examples
from dtrain.data.published import PublishedArchive, check_labels, listing, locate
from dtrain.data.unpickling import load_arrays
from dtrain.errors import DataError

_PIXELS = 3 * 32 * 32
_CLASSES = 10
_FULL_BATCH = 10_000
_TRAINING_BATCHES = 5
_BATCH_FILE = re.compile(r"(data_batch_([1-9][0-9]{0,5})|test_batch)")


class Cifar10(NamedTuple):
    """The training and the test images, as the authors divided them; no image is in both.

    Attributes:
        train: 50000 images, uint8 of shape (n, 32, 32, 3), red, green and blue from 0 to 255; labels int64 of
            shape (n,), from 0 to 9.
        test: 10000 images and labels of the same types.

    Example:
        ```python
        (images, labels), (test_images, test_labels) = dtrain.data.load_cifar10()
        ```
    """

    train: Examples
    test: Examples


_PUBLISHED = PublishedArchive(
    title="CIFAR-10",
    name="cifar-10-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    size=170_498_071,
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    names_in_keras=("cifar-10-batches-py-target_archive",),
)


def load_cifar10(
    path: str | os.PathLike[str] | None = None, *, limit: int | None = None, download: bool = False
) -> Cifar10:
    """Load CIFAR-10, in the order of its files; that order is the same on every machine.

    Args:
        path: `cifar-10-python.tar.gz`, or the folder that contains it. None looks in `DTRAIN_DATA_DIR`
            (`data` in the current folder if it is not set) and in `~/.keras/datasets`. An archive of the
            published size must have the published SHA-256 sum.
        limit: load at most this many images of each part.
        download: whether to download the archive (170 MB) into the first of these folders if it is in none.

    Returns:
        `Cifar10(train, test)`; smaller archives in the same format give fewer images.

    Raises:
        DataError: the data is missing, cannot be downloaded, is cut off, damaged, or of another data set.
        ConfigurationError: `limit` is not an integer of at least 1.

    Example:
        ```python
        cifar10 = dtrain.data.load_cifar10(limit=4)  # reads data/cifar-10-python.tar.gz
        print(cifar10.train.images.shape)  # (4, 32, 32, 3)
        ```
    """
    archive = locate(_PUBLISHED, path, limit, may_download=download)
    with open_archive(archive) as files:
        train, test = _batch_files(files.names(), archive)
        data = Cifar10(train=_joined(files, train, archive, limit), test=_joined(files, test, archive, limit))
    logger.info("CIFAR-10: %d + %d images from %s", len(data.train.labels), len(data.test.labels), archive)
    if len(train) < _TRAINING_BATCHES and len(data.train.labels) == len(train) * _FULL_BATCH:
        logger.warning(
            "%s has %d of the %d training batches that are published.",
            archive,
            len(train),
            _TRAINING_BATCHES,
        )
    return data


def _joined(files: Archive, names: list[str], path: Path, limit: int | None) -> Examples:
    """Concatenate the images of the batch files; reads no more files than `limit` needs."""
    batches: list[Examples] = []
    # Without a limit all files are read in one call, so that the archive is decompressed once.
    for group in [names] if limit is None else [[name] for name in names]:
        if limit is None or sum(len(batch.labels) for batch in batches) < limit:
            for name, raw in files.read(group):
                batches.append(_parse(raw, f"{cleaned(name)} in {path}"))
    images, labels = (np.concatenate(arrays)[:limit] for arrays in zip(*batches, strict=True))
    return Examples(images, labels)


def _batch_files(names: list[str], path: Path) -> tuple[list[str], list[str]]:
    """The names of the training batches, in order, and of the test batch."""
    matches = [(match, name) for name in names if (match := _BATCH_FILE.fullmatch(name.rpartition("/")[2]))]
    train = sorted((name for match, name in matches if match[2]), key=lambda name: by_number(Path(name).name))
    test = [name for match, name in matches if not match[2]]
    if not train or not test:
        lacking = "training batches (data_batch_1, ...)" if not train else "test batch (test_batch)"
        raise DataError(
            f"{path} has no CIFAR-10 {lacking}; it holds {listing(names)}.",
            hint=f"The archive must have the layout of {_PUBLISHED.url}.",
        )
    numbers = [int(match[2]) for match, _ in matches if match[2]]
    if sorted(numbers) != list(range(1, len(numbers) + 1)) or len(test) > 1:
        raise DataError(
            f"{path} should hold the batches 1, 2, ... and one of test, each once; it holds "
            f"{listing(train + test)}.",
            hint="Fetch the published archive again.",
        )
    return train, test


def _parse(raw: bytes, where: str) -> Examples:
    rows, labels = _pickled_batch(raw, where)
    check_labels(labels, _CLASSES, where)
    # Stored channels first; Keras on TensorFlow trains on channels last.
    images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Examples(np.ascontiguousarray(images), labels)


def _pickled_batch(raw: bytes, where: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    try:
        # The published files, written by Python 2, have bytes as keys; a newer file may have text.
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in load_arrays(raw).items()}
        data, labels = _array(fields.get("data")), _array(fields.get("labels"))
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{where} is not a pickle of arrays by name: {type(error).__name__}: {cleaned(error)}.",
            hint="It is damaged or another kind of file. Only arrays, lists and text are unpickled.",
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
    if isinstance(field, list) and not all(isinstance(item, int | np.integer) for item in field):
        raise ValueError("it holds a list of something else than whole numbers")
    return np.asarray(field)
