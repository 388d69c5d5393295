"""The files of a data set, read from a tar archive or from the folder that it was extracted to.

Nothing is ever extracted to disk, so nothing is written over and no name in an archive can lead outside.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, cast

from dtrain.errors import DataError

_BLOCK = 512  # bytes; all in a tar archive is a multiple of it
_CHUNK = 1 << 20
_OPENERS: dict[bytes, Callable[[IO[bytes]], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


class Files(Protocol):
    """Named files, wherever they are."""

    def names(self) -> list[str]:
        """All names, relative and with `/`, numbers in them sorted as numbers: the same on every machine."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Name and content of each, in the order of `names`."""


@contextmanager
def open_files(path: Path) -> Iterator[Files]:
    """Open a folder, or a tar archive that is plain or compressed with gzip, bzip2 or xz.

    Raises:
        DataError: a file that is no tar archive, is cut off, or is damaged; all of it is checked here.
    """
    if path.is_dir():
        yield _Folder(path)
        return
    with path.open("rb") as raw, _decompressed(path, raw) as stream:
        with _damage_reported(path):
            tar = tarfile.TarFile(fileobj=stream)
            members = tar.getmembers()
            _check_end(path, raw, stream, members)
        yield _Tar(path, tar, members)


def by_number(name: str) -> tuple[str | int, ...]:
    """A key that sorts `9_1.txt` before `10_1.txt`."""
    return tuple(
        int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name, flags=re.ASCII))
    )


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        found = (p.relative_to(self._root).as_posix() for p in self._root.rglob("*") if p.is_file())
        return sorted(found, key=by_number)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            yield name, (self._root / name).read_bytes()


class _Tar:
    def __init__(self, path: Path, tar: tarfile.TarFile, members: list[tarfile.TarInfo]) -> None:
        self._path = path
        self._tar = tar
        # A link could name any file of the machine; only what is itself in the archive is read.
        self._members = {member.name.removeprefix("./"): member for member in members if member.isreg()}

    def names(self) -> list[str]:
        return sorted(self._members, key=by_number)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        wanted = list(names)
        contents: dict[str, bytes] = {}
        # To go back in a compressed file is to begin again, so all are read in the archive's order.
        for name in sorted(wanted, key=lambda each: self._members[each].offset_data):
            with _damage_reported(self._path):
                file = self._tar.extractfile(self._members[name])
                contents[name] = file.read() if file is not None else b""
        for name in wanted:
            yield name, contents.pop(name)


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    start = raw.read(max(map(len, _OPENERS)))
    raw.seek(0)
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            return cast("IO[bytes]", opener(raw))
    if not start:
        raise DataError(f"{path} is empty.", hint="Fetch it again.")
    return raw


def _check_end(path: Path, raw: IO[bytes], stream: IO[bytes], members: list[tarfile.TarInfo]) -> None:
    """Find the end mark, a block of zeros: without it the archive is cut off between two files.

    `tarfile` ends in silence there, and at a header that is damaged. A compressed archive is read to its last
    byte, because the sum that shows damage is behind it.
    """
    # Folders and links have a header, but no data.
    sizes = [-(-member.size // _BLOCK) * _BLOCK if member.isreg() else 0 for member in members]
    end = max((m.offset_data + size for m, size in zip(members, sizes, strict=True)), default=0)
    whole = stream.tell() >= end + _BLOCK
    if raw is stream:
        raw.seek(end)
        whole = raw.read(_BLOCK) == bytes(_BLOCK)
    if not whole:
        raise DataError(
            f"{path} is cut off or damaged after {len(members)} entries: no end mark follows.",
            hint="Fetch it again.",
        )
    while stream.read(_CHUNK):
        pass


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's or the system's, which names the file itself
        with path.open("rb") as file:
            start = file.read(24)
        raise DataError(
            f"{path} ({path.stat().st_size} bytes, beginning {start!r}) is no whole tar archive: {error}.",
            hint="It is cut off, damaged, or something else, such as a web page. Fetch it again.",
        ) from error
