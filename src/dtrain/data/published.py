"""Finds a published data set on this machine: its archive, its extracted folder, or a prepared folder.

It checks an archive's sum, but not its content; the file of the data set does that. It downloads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.cluster import settings
from dtrain.data.archives import by_number
from dtrain.data.checksums import PublishedArchive, check_archive
from dtrain.errors import ConfigurationError, DataError
from dtrain.plain_text import cleaned
from dtrain.words import whole_number

_ENDINGS = (".tar.gz", ".tgz", ".tar")
_INFO = "dataset_info.json"  # tensorflow-datasets writes this file into a folder that it has prepared


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set, and the names that its three forms have on a disk.

    Attributes:
        title: its name in messages.
        archives: the archives that its authors publish; messages recommend the first.
        folders: the folders that the archives extract to, relative to the parent folder.
        prepared: the folder that tensorflow-datasets prepares, without the version.
        is_folder: tells whether a folder is the extracted data set itself.
    """

    title: str
    archives: tuple[PublishedArchive, ...]
    folders: tuple[str, ...]
    prepared: str
    is_folder: Callable[[Path], bool]


class Located(NamedTuple):
    """A data set on this machine.

    Attributes:
        path: the archive or the folder.
        form: `archive`, `folder` for an extracted one, or `prepared` for a folder of tensorflow-datasets.
    """

    path: Path
    form: Literal["archive", "folder", "prepared"]


def locate(
    published: Published, path: str | os.PathLike[str] | None, checksum: str | None, limit: int | None
) -> Located:
    """Finds a data set at `path`, or without a path in the usual folders, and checks the sum of an archive.

    If a folder holds several forms of the data set, the archive is taken, because its sum covers all data.

    Args:
        published: the data set to find.
        path: the archive, the extracted folder, the prepared one, or the folder that contains one of these.
        checksum: the archive's expected sum, as `md5:<digits>` or `sha256:<digits>`, or None.
        limit: how many examples of each part are to be loaded; None loads all.

    Raises:
        DataError: the data set is not there (the message says where dtrain looked, the hint where to download
            it), or a sum of the archive differs.
        ConfigurationError: `limit` or `checksum` is malformed, or `checksum` was given for a folder.
    """
    if limit is not None:
        whole_number(limit, "limit", 1)
    found = _find(published, path)
    if found.form == "archive":
        check_archive(found.path, given=checksum, published=published.archives)
    elif checksum is not None:
        raise ConfigurationError(
            f"checksum= is for an archive, and {found.path} is a folder.", hint="Leave it out."
        )
    return found


def _find(published: Published, path: str | os.PathLike[str] | None) -> Located:
    if path is None:
        folders = usual_folders()
        for folder in folders:
            if found := _inside(published, folder):
                return found
        raise _missing(published, folders)
    given = Path(path).expanduser()
    if given.is_file():
        return Located(given, "archive")
    found = _inside(published, given) or _itself(published, given)
    if found is None:
        raise _missing(published, [given])
    return found


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


def listing(names: list[str], *, most: int = 8) -> str:
    """The first `most` names of a list and how many more there are, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(cleaned(name) for name in names[:most]) + more if names else "nothing"


def _inside(published: Published, parent: Path) -> Located | None:
    for archive in published.archives:
        stem = archive.name.removesuffix(_ENDINGS[0])
        for ending in _ENDINGS:
            if (file := parent / f"{stem}{ending}").is_file():
                return Located(file, "archive")
    for folder in published.folders:
        if (parent / folder).is_dir():
            return Located(parent / folder, "folder")
    return _newest(parent / published.prepared)


def _itself(published: Published, folder: Path) -> Located | None:
    if (folder / _INFO).is_file():
        return Located(folder, "prepared")
    # tensorflow-datasets nests DATASET/CONFIGURATION/VERSION; `folder` may be any of these levels.
    for part in (folder / Path(published.prepared).name, folder):
        if found := _newest(part):
            return found
    return Located(folder, "folder") if folder.is_dir() and published.is_folder(folder) else None


def _newest(folder: Path) -> Located | None:
    """The prepared folder of the highest version; unfinished folders do not begin with a digit."""
    versions = [info.parent for info in folder.glob(f"[0-9]*/{_INFO}")]
    return Located(max(versions, key=lambda each: by_number(each.name)), "prepared") if versions else None


def _missing(published: Published, folders: list[Path]) -> DataError:
    looked = [archive.name for archive in published.archives] + [
        f"{folder}/" for folder in (*published.folders, published.prepared)
    ]
    seen = [
        f"{folder.absolute()} ({_contents(folder) if folder.is_dir() else 'no such folder'})"
        for folder in folders
    ]
    first = published.archives[0]
    return DataError(
        f"{published.title} was not found. Looked for {', '.join(looked)} in {' and in '.join(seen)}.",
        hint=f"Fetch {first.url} and put {first.name} into {folders[0].absolute()}, as it is; or set "
        "DTRAIN_DATA_DIR, or path=, to the folder that it is in. Nothing is fetched while training.",
    )


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"which holds {listing(names)}"
