"""IMDb: 50000 real film reviews, half of them positive and half negative, as their collectors publish them.

It returns the texts as they were written; it does not split them into words or tokens.
Source: Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtrain.base.log import logger
from dtrain.base.plain_text import cleaned
from dtrain.data.archives import Archive, by_number, open_archive
from dtrain.data.published import PublishedArchive, listing, locate
from dtrain.data.texts import Texts, check_encoding, wrong_encoding
from dtrain.errors import DataError

_CLASSES = ("neg", "pos")  # by label
_PARTS = ("train", "test")


class Imdb(NamedTuple):
    """The training and the test reviews, as the collectors divided them; no film is in both.

    Attributes:
        train: 25000 reviews; label 0 is negative, 1 positive.
        test: 25000 reviews with the same labels.

    Example:
        ```python
        (texts, labels), (test_texts, test_labels) = dtrain.data.load_imdb()
        ```
    """

    train: Texts
    test: Texts


_PUBLISHED = PublishedArchive(
    title="IMDb",
    name="aclImdb_v1.tar.gz",
    url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    size=84_125_825,
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)


def load_imdb(
    path: str | os.PathLike[str] | None = None,
    *,
    limit: int | None = None,
    encoding: str = "utf-8",
    download: bool = False,
) -> Imdb:
    """Load the labelled reviews; reviews without a label (`unsup`) are left out.

    The order is the same on every machine: by number, negative and positive reviews alternating, so that the
    first n are balanced.

    Args:
        path: `aclImdb_v1.tar.gz`, or the folder that contains it. None looks in `DTRAIN_DATA_DIR` (`data` in
            the current folder if it is not set) and in `~/.keras/datasets`. An archive of the published size
            must have the published SHA-256 sum.
        limit: load at most this many reviews of each part.
        encoding: encoding of the texts.
        download: whether to download the archive (84 MB) into the first of these folders if it is in none.

    Returns:
        `Imdb(train, test)`; smaller archives in the same format give fewer reviews.

    Raises:
        DataError: the data is missing, cannot be downloaded, is cut off, damaged, in another encoding, or of
            another data set.
        ConfigurationError: `limit` or `encoding` is malformed.

    Example:
        ```python
        imdb = dtrain.data.load_imdb(limit=4)  # reads data/aclImdb_v1.tar.gz
        print(imdb.train.labels)  # [0 1 0 1]
        ```
    """
    check_encoding(encoding)
    archive = locate(_PUBLISHED, path, limit, may_download=download)
    with open_archive(archive) as files:
        reviews = _reviews(files.names(), archive)
        data = Imdb(*(_part(files, reviews[part][:limit], encoding, archive) for part in _PARTS))
    logger.info("IMDb: %d + %d reviews from %s", len(data.train.texts), len(data.test.texts), archive)
    return data


def _reviews(names: list[str], path: Path) -> dict[str, list[tuple[str, int]]]:
    """For each part, the names of its files in order, each with its label."""
    files: dict[tuple[str, ...], list[str]] = {(part, kind): [] for part in _PARTS for kind in _CLASSES}
    for name in names:
        folders, _, file = name.rpartition("/")
        where = tuple(folders.split("/")[-2:])
        # Some systems add hidden files, whose names begin with a dot, to archives.
        if where in files and file.endswith(".txt") and not file.startswith("."):
            files[where].append(name)
    for where, paths in files.items():
        if not paths:
            raise DataError(
                f"{path} has no reviews in {'/'.join(where)}; it holds {listing(names)}.",
                hint="The published archive is laid out as aclImdb/{train,test}/{neg,pos}/*.txt.",
            )
        paths.sort(key=lambda name: by_number(name.rpartition("/")[2]))
    return {part: _in_turn([files[part, kind] for kind in _CLASSES]) for part in _PARTS}


def _in_turn(classes: Sequence[list[str]]) -> list[tuple[str, int]]:
    rounds = zip_longest(*classes)
    return [(name, label) for names in rounds for label, name in enumerate(names) if name is not None]


def _part(files: Archive, wanted: list[tuple[str, int]], encoding: str, path: Path) -> Texts:
    texts = []
    for name, raw in files.read(name for name, _ in wanted):
        try:
            texts.append(raw.decode(encoding))
        except UnicodeDecodeError as error:
            raise wrong_encoding(f"{cleaned(name)} in {path}", error) from error
    return Texts(texts, np.array([label for _, label in wanted], np.int64))
