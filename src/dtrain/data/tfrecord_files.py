"""The framing of TFRecord files: how many records a file holds, and whether it is whole.

Each record is its length (8 bytes, little endian), a checksum of the length, the data and a checksum of the
data; both checksums are masked CRC-32C. What a record means is not looked at here.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from dtrain.errors import ConfigurationError, DataError

COMPRESSIONS = ("", "GZIP", "ZLIB")
_PIECE = 16 << 20  # bytes that are read at a time
_LONGEST_RECORD = (2 << 30) - 1  # bytes; a protocol buffer cannot be longer
_HEADER = struct.Struct("<QI")
_FOOTER = 4
_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78


def check_compression(compression: str | None) -> str:
    """The name that TensorFlow knows a compression by; "" is none.

    Raises:
        ConfigurationError: it is not known.
    """
    name = (compression or "").upper()
    if name not in COMPRESSIONS:
        raise ConfigurationError(f"compression={compression!r} is not known.", hint="None, 'GZIP' or 'ZLIB'")
    return name


def scan(path: str, compression: str) -> tuple[int, bytes | None, bytes | None, int]:
    """Goes from record to record through a file; data are skipped, or decompressed where they must be.

    Args:
        path: of a local file, or one that TensorFlow's file systems know.
        compression: "", "GZIP" or "ZLIB".

    Returns:
        How many records there are, the first one, the last one, and the bytes of all, decompressed.

    Raises:
        DataError: the file cannot be read, is cut off or is damaged; it names the file and the record.
    """
    with _opened(path, compression) as file:
        size = None if compression else _size_of(file)
        count, at, start = 0, 0, 0
        first = last = None
        while header := _read(file, _HEADER.size, path, count, at_end=True):
            length = _length(header, path, count)
            start, at = at + _HEADER.size, at + _HEADER.size + length + _FOOTER
            if size is not None and at > size:
                raise _cut_off(path, count)
            if count == 0 or size is None:
                last = _read(file, length + _FOOTER, path, count)[:length]
                first = last if first is None else first
            else:
                file.seek(at)
            count += 1
        if size is not None and count > 1:
            file.seek(start)
            last = _read(file, at - start - _FOOTER, path, count - 1)
    return count, first, last, at


def _length(header: bytes, path: str, record: int) -> int:
    """The length of a record, from what stands before it."""
    if len(header) < _HEADER.size:
        raise _cut_off(path, record)
    length, checksum = _HEADER.unpack(header)
    # Looked at before the jump: a damaged length leads anywhere.
    if _masked_crc(header[:8]) != checksum:
        raise DataError(
            f"{path} is no TFRecord file, or is damaged: record {record} has a wrong checksum.",
            hint="write it again; if it is compressed, say compression='GZIP' or 'ZLIB'",
        )
    if length > _LONGEST_RECORD:
        raise DataError(
            f"Record {record} of {path} says that it has {length} bytes; no example can have more than "
            f"{_LONGEST_RECORD}.",
            hint="the file is damaged, or not of examples: write it again",
        )
    return int(length)


def _read(file: Any, count: int, path: str, record: int, *, at_end: bool = False) -> bytes:
    """The next bytes; fewer of them only if the file may end here."""
    found = b""
    try:
        # Piece by piece, so that a length that is not true takes no memory.
        while len(found) < count and (piece := file.read(min(_PIECE, count - len(found)))):
            found = found + piece if found else bytes(piece)
    except (EOFError, OSError, zlib.error) as error:
        raise _cut_off(path, record) from error
    if len(found) < count and not at_end:
        raise _cut_off(path, record)
    return found


def _cut_off(path: str, record: int) -> DataError:
    return DataError(f"{path} is cut off or damaged in record {record}.", hint="copy or write the file again")


def _size_of(file: Any) -> int:
    if hasattr(file, "size"):
        return int(file.size())
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return int(size)


@contextmanager
def _opened(path: str, compression: str) -> Iterator[IO[bytes]]:
    """A file-like object over what a file holds, decompressed.

    Raises:
        DataError: it cannot be opened.
    """
    with _raw(path) as raw:
        if compression == "GZIP":
            with gzip.GzipFile(fileobj=raw) as file:
                yield file  # type: ignore[misc]
        elif compression == "ZLIB":
            inflated = io.BufferedReader(_Inflated(raw))
            try:
                inflated.peek(1)
            except (zlib.error, EOFError) as error:
                raise DataError(
                    f"{path} is not compressed by ZLIB, or is damaged: {error}.",
                    hint="copy or write the file again, or name its compression",
                ) from error
            yield inflated
        else:
            yield raw


class _Inflated(io.RawIOBase):
    """What a file compressed by ZLIB holds, piece by piece: all of it may be a thousand times as large."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._inflater = zlib.decompressobj()
        self._packed = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """The next bytes; EOFError where the file ends too early."""
        while not self._inflater.eof:
            self._packed = self._packed or self._raw.read(_PIECE)
            found = self._inflater.decompress(self._packed, len(buffer))
            ended = not self._packed and not found
            self._packed = self._inflater.unconsumed_tail
            if found:
                buffer[: len(found)] = found
                return len(found)
            if ended:
                raise EOFError("the compressed data ends too early")
        return 0


@contextmanager
def _raw(path: str) -> Iterator[Any]:
    try:
        if "://" in path:
            import tensorflow as tf

            file: Any = tf.io.gfile.GFile(path, "rb")
        else:
            file = open(path, "rb")  # noqa: SIM115, PTH123
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}.", hint="look at its name and rights"
        ) from error
    with file:
        yield file


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(entry >> 1) ^ _POLYNOMIAL if entry & 1 else entry >> 1 for entry in table]
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state = _TABLE[(state ^ byte) & 0xFF] ^ (state >> 8)
    crc = state ^ 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
