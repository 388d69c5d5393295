"""Finds the archive of a published data set on this machine, and compares it with the published sum.

It does not read the archive's content; the file of the data set does that. `download.py` downloads an archive
that is missing, if the user asked for it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dtrain.base import safe_files
from dtrain.base.plain_text import cleaned
from dtrain.base.words import whole_number
from dtrain.data.download import download
from dtrain.environments import settings
from dtrain.errors import DataError

_LISTED = 8  # names of a list that a message shows


@dataclass(frozen=True, kw_only=True)
class PublishedArchive:
    """A data set's archive as its authors publish it.

    Attributes:
        title: the data set's name in messages.
        name: the archive's file name.
        url: where to download it.
        size: in bytes.
        sha256: its SHA-256 sum, in lower-case hexadecimal digits.
        names_in_keras: the file names under which Keras' own loaders keep the same archive.
    """

    title: str
    name: str
    url: str
    size: int
    sha256: str
    names_in_keras: tuple[str, ...] = ()


def locate(
    published: PublishedArchive,
    path: str | os.PathLike[str] | None,
    limit: int | None,
    *,
    may_download: bool = False,
) -> Path:
    """Finds a data set's archive, and compares its sum if it has the published size.

    An archive of another size is assumed to be a subset in the same format, and its sum is not checked.

    Args:
        published: the archive to find.
        path: the archive, or a folder that contains it; None looks in the usual folders.
        limit: how many examples of each part are to be loaded; None loads all.
        may_download: whether to download an archive that is missing, into the first of the folders.

    Raises:
        DataError: the archive is not there (the message says where dtrain looked, the hint where to download
            it), its sum differs, or it cannot be downloaded.
        ConfigurationError: `limit` is not an integer of at least 1.
    """
    if limit is not None:
        whole_number(limit, "limit", 1)
    folders = usual_folders() if path is None else [Path(path).expanduser()]
    places = [folder / name for folder in folders for name in (published.name, *published.names_in_keras)]
    archive = next((place for place in (*folders, *places) if place.is_file()), None)
    if archive is None and may_download:
        archive = folders[0] if folders[0].name == published.name else folders[0] / published.name
        download(published.title, published.url, published.sha256, archive)
    if archive is None:
        raise _missing(published, folders)
    if archive.stat().st_size == published.size:
        with safe_files.open_to_read(archive, links=True) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != published.sha256:
            raise DataError(
                f"{archive} has the SHA-256 sum {sha256}, but the published {published.name}, which has the "
                f"same size, has {published.sha256}.",
                hint="The file is damaged or another one: download it again.",
            )
    return archive


def usual_folders() -> list[Path]:
    """The data directory (`DTRAIN_DATA_DIR`, or `data` in the current folder), and Keras' download folder."""
    return [settings.data_directory(), Path("~/.keras/datasets").expanduser()]


def check_labels(labels: NDArray[np.int64], classes: int, where: str) -> None:
    """Check the labels of a file.

    Raises:
        DataError: one is not from 0 to `classes - 1`.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{where} has the label {labels[wrong[0]]} in record {wrong[0]} ({len(wrong)} such records); "
            f"the data set has the labels 0 to {classes - 1}.",
            hint="The file is damaged, holds examples without labels, or is of another data set.",
        )


def listing(names: list[str]) -> str:
    """The first names of a list and how many more there are, for a message."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(cleaned(name) for name in names[:_LISTED]) + more if names else "nothing"


def _missing(published: PublishedArchive, folders: list[Path]) -> DataError:
    seen = [
        f"{folder.absolute()} ({_contents(folder) if folder.is_dir() else 'no such folder'})"
        for folder in folders
    ]
    return DataError(
        f"{published.title} was not found. Looked for {published.name} in {' and in '.join(seen)}.",
        hint=f"With a network, use --download or download=True. Without one, download {published.url} "
        f"elsewhere and put {published.name} into {folders[0].absolute()}, as it is; or set DTRAIN_DATA_DIR, "
        "or path=, to the folder that it is in.",
    )


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"which holds {listing(names)}"
