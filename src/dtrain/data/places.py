"""Where is a published data set on this machine? Finds its archive, its extracted folder, or a prepared one.

It only looks: nothing is fetched, and what is found is read and checked by the file of the data set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dtrain.cluster import settings
from dtrain.data.archives import by_number
from dtrain.data.checksums import PublishedArchive
from dtrain.errors import ConfigurationError, DataError
from dtrain.plain_text import cleaned

_ENDINGS = (".tar.gz", ".tgz", ".tar")
_INFO = "dataset_info.json"  # what tensorflow-datasets leaves in a folder that it has prepared


@dataclass(frozen=True, kw_only=True)
class Published:
    """A data set, and the names that its forms have on a disk.

    Attributes:
        title: its name for people.
        archives: as its authors publish it; the first is the one to fetch.
        folders: what the archives, and those who unpack them, make; relative to the parent folder.
        prepared: the folder of tensorflow-datasets, without the version.
        is_folder: whether a folder is the extracted data set itself.
    """

    title: str
    archives: tuple[PublishedArchive, ...]
    folders: tuple[str, ...]
    prepared: str
    is_folder: Callable[[Path], bool]


class Found(NamedTuple):
    """What there is of a data set.

    Attributes:
        path: the archive or the folder.
        form: which of the three it is; `prepared` is a folder of tensorflow-datasets.
    """

    path: Path
    form: Literal["archive", "folder", "prepared"]


def find(published: Published, path: str | os.PathLike[str] | None) -> Found:
    """The data set at `path`, or in the usual places where no path is given.

    Where a folder holds several forms of it, the archive is taken: its checksum covers all of it.

    Args:
        published: what is looked for.
        path: the archive, the extracted folder, the prepared one, or the folder that one of these is in.

    Raises:
        DataError: it is not there; the message says where it was looked for, the hint where to get it.
    """
    if path is None:
        places = usual_places()
        for place in places:
            if found := _inside(published, place):
                return found
        raise _missing(published, places)
    given = Path(path).expanduser()
    if given.is_file():
        return Found(given, "archive")
    found = _inside(published, given) or _itself(published, given)
    if found is None:
        raise _missing(published, [given])
    return found


def usual_places() -> list[Path]:
    """The data directory (`DTRAIN_DATA_DIR`, or `data` here), and where Keras keeps what it fetches."""
    return [settings.data_directory(), Path("~/.keras/datasets").expanduser()]


def check_limit(limit: int | None) -> None:
    """Refuse a limit that leaves nothing.

    Raises:
        ConfigurationError: it is neither None nor an integer of at least 1.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(
            f"limit={limit!r} is not an integer of at least 1.", hint="Leave it out to load everything."
        )


def listing(names: list[str], *, most: int = 8) -> str:
    """A few names for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(cleaned(name) for name in names[:most]) + more if names else "nothing"


def _inside(published: Published, place: Path) -> Found | None:
    for archive in published.archives:
        stem = archive.name.removesuffix(_ENDINGS[0])
        for ending in _ENDINGS:
            if (file := place / f"{stem}{ending}").is_file():
                return Found(file, "archive")
    for folder in published.folders:
        if (place / folder).is_dir():
            return Found(place / folder, "folder")
    return _newest(place / published.prepared)


def _itself(published: Published, folder: Path) -> Found | None:
    if (folder / _INFO).is_file():
        return Found(folder, "prepared")
    # The folder of one data set, or of one of its configurations, as tensorflow-datasets nests them.
    for part in (folder / Path(published.prepared).name, folder):
        if found := _newest(part):
            return found
    return Found(folder, "folder") if folder.is_dir() and published.is_folder(folder) else None


def _newest(folder: Path) -> Found | None:
    """The highest version among the prepared ones; what was not finished has another form of name."""
    versions = [info.parent for info in folder.glob(f"[0-9]*/{_INFO}")]
    return Found(max(versions, key=lambda each: by_number(each.name)), "prepared") if versions else None


def _missing(published: Published, places: list[Path]) -> DataError:
    looked = [archive.name for archive in published.archives] + [
        f"{folder}/" for folder in (*published.folders, published.prepared)
    ]
    seen = [
        f"{place.absolute()} ({_contents(place) if place.is_dir() else 'no such folder'})" for place in places
    ]
    first = published.archives[0]
    return DataError(
        f"{published.title} was not found. Looked for {', '.join(looked)} in {' and in '.join(seen)}.",
        hint=f"Fetch {first.url} and put {first.name} into {places[0].absolute()}, as it is; or set "
        "DTRAIN_DATA_DIR, or path=, to the folder that it is in. Nothing is fetched while training.",
    )


def _contents(place: Path) -> str:
    names = sorted(entry.name for entry in place.iterdir())
    return f"which holds {listing(names)}"
