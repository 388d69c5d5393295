"""Reads the files of a data set from a tar archive.

It never extracts to disk, so it overwrites nothing, and no name or link can lead outside. Sizes and lengths
that an archive declares are checked against limits before they cost memory or time.
"""

from __future__ import annotations

import gzip
import re
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self, cast

from dtrain.base import safe_files
from dtrain.base.plain_text import cleaned
from dtrain.errors import DataError

_BLOCK = 512  # bytes; headers and files in a tar archive fill multiples of it
_CHUNK = 1 << 20
# From `struct.error` on: what `tarfile` raises for malformed numbers and headers.
_DAMAGE = (
    EOFError,
    zlib.error,
    tarfile.TarError,
    struct.error,
    ValueError,
    OverflowError,
    IndexError,
    RecursionError,
)

# The limits are several times the sizes of the published data sets.
MOST_BYTES = 2 << 30
"""Limit of the bytes of a decompressed archive; a hostile archive could grow to a million times its size."""

LARGEST = 512 << 20
"""Limit of the bytes of one file in an archive; a file is read into memory as a whole."""

_MOST_MEMBERS = 500_000
_LONGEST_HEADER = 256 << 10  # bytes of all headers of one entry
_MOST_NAMES = 128 << 20  # characters of all names together
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a tar archive that is compressed with gzip.

    Raises:
        DataError: the file is no tar archive, is cut off, or is damaged. The whole archive is checked here.
    """
    with safe_files.open_to_read(path, links=True) as packed, gzip.open(packed) as file:
        stream = cast("IO[bytes]", file)
        with _damage_reported(path):
            metered = _Metered(stream)
            tar = tarfile.TarFile(fileobj=cast("IO[bytes]", metered), tarinfo=_Header)
            members = _members(path, tar, metered)
            _check_end(path, stream, len(members), tar.offset)
        yield Archive(path, tar, metered, members)


def by_number(name: str) -> tuple[str | tuple[int, str], ...]:
    """A key that sorts `9_1.txt` before `10_1.txt`, however many digits a number has."""
    parts = re.split(r"(\d+)", name, flags=re.ASCII)
    return tuple(_by_value(part) if at % 2 else part for at, part in enumerate(parts))


def _by_value(digits: str) -> tuple[int, str]:
    # Compared as text: Python refuses to convert thousands of digits to an integer.
    significant = digits.lstrip("0")
    return len(significant), significant


class _Metered:
    """Limits how many bytes `tarfile` reads from a stream, because it trusts the lengths in headers.

    Args:
        stream: the stream to read.

    Attributes:
        left: bytes that may still be read.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.left = _LONGEST_HEADER

    def read(self, size: int = -1) -> bytes:
        """Read as a file does; `tarfile.ReadError` beyond the limit."""
        self.left -= size
        if size < 0 or self.left < 0:
            raise tarfile.ReadError(f"the headers of one entry have more than {_LONGEST_HEADER} bytes")
        return self._stream.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        """As a file does."""
        return self._stream.seek(position, whence)

    def tell(self) -> int:
        """As a file does."""
        return self._stream.tell()


class _Header(tarfile.TarInfo):
    """A header that refuses a negative size, with which `tarfile` would loop for ever."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError(f"a header says that {header.size} bytes follow")
        return header


def _members(path: Path, tar: tarfile.TarFile, metered: _Metered) -> list[tarfile.TarInfo]:
    """List the entries of an archive; an error if the archive exceeds the limits."""
    members: list[tarfile.TarInfo] = []
    names = end = 0
    while (member := tar.next()) is not None:
        members.append(member)
        names += len(member.name) + len(member.linkname) + sum(map(len, member.pax_headers.values()))
        # `offset` is where `tarfile` looks for the next header: it must come after this entry.
        if member.size < 0 or tar.offset <= end:
            raise tarfile.ReadError(f"the header of entry {len(members)} leads backwards")
        end, metered.left = tar.offset, _LONGEST_HEADER
        if member.size > LARGEST:
            raise too_large(f"{cleaned(member.name)} in {path} has {member.size >> 20} MiB")
        if end > MOST_BYTES or len(members) > _MOST_MEMBERS or names > _MOST_NAMES:
            raise too_large(
                f"{path} holds more than {len(members) - 1} entries and {end >> 20} MiB once it is "
                "decompressed"
            )
    return members


def too_large(what: str) -> DataError:
    """The error for an archive or a file that exceeds the limits."""
    return DataError(
        f"{what}; at most {MOST_BYTES >> 20} MiB in {_MOST_MEMBERS} entries are read, of {LARGEST >> 20} MiB "
        "each.",
        hint="It is damaged, made to fill this machine, or of another data set: fetch it again.",
    )


class Archive:
    """The files of an open archive, which are read by name."""

    def __init__(
        self, path: Path, tar: tarfile.TarFile, metered: _Metered, members: list[tarfile.TarInfo]
    ) -> None:
        self._path = path
        self._tar = tar
        self._metered = metered
        # Links are left out: a link could name any file of the machine. Sparse files are left out: a file
        # with holes could declare any size.
        self._members = {
            member.name.removeprefix("./"): member
            for member in members
            if member.type in _PLAIN and member.sparse is None
        }

    def names(self) -> list[str]:
        """The names of all files, with `/`; numbers in names sort as numbers, on every machine."""
        return sorted(self._members, key=by_number)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each file, in the order of `names`."""
        wanted = list(names)
        contents: dict[str, bytes] = {}
        # Seeking backwards in a compressed file decompresses it from its start: read in the archive's order.
        for name in sorted(wanted, key=lambda name: self._members[name].offset_data):
            self._metered.left = self._members[name].size + _LONGEST_HEADER
            with _damage_reported(self._path):
                file = self._tar.extractfile(self._members[name])
                contents[name] = file.read() if file is not None else b""
        for name in wanted:
            yield name, contents.pop(name)


def _check_end(path: Path, stream: IO[bytes], entries: int, end: int) -> None:
    """Check for the end mark, a block of zeros; without it the archive is cut off between two files.

    `tarfile` stops without an error where an archive is cut off. The archive is read to its last byte,
    because the checksum that shows damage comes last.
    """
    if stream.tell() < end + _BLOCK:
        raise DataError(
            f"{path} is cut off or damaged after {entries} entries: no end mark follows.",
            hint="Fetch it again.",
        )
    while stream.read(_CHUNK):
        if stream.tell() > MOST_BYTES:
            raise too_large(f"{path} holds more than {MOST_BYTES >> 20} MiB once it is decompressed")


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk or the system; its message names the file
        with safe_files.open_to_read(path, links=True) as file:
            start = file.read(24)
        raise DataError(
            f"{path} ({path.stat().st_size} bytes, beginning {start!r}) is not a complete tar archive: "
            f"{cleaned(error)}.",
            hint="It is incomplete, damaged, or another kind of file, such as a web page. Download it again.",
        ) from error
