"""The framing of TFRecord files: counts the records of a file, and checks that the file is complete.

Each record is its length (8 bytes, little endian), a checksum of the length, the data and a checksum of the
data; both checksums are masked CRC-32C. Only the checksum of the length is verified here, and the data is not
parsed.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from dtrain.base import safe_files
from dtrain.errors import ConfigurationError, DataError
from dtrain.upstream.tf_data import masked_crc32c

COMPRESSIONS = ("", "GZIP", "ZLIB")
_PIECE = 16 << 20  # bytes that are read at a time
_LONGEST_RECORD = (2 << 30) - 1  # bytes; a protocol buffer cannot be longer
_HEADER = struct.Struct("<QI")
_FOOTER = 4


def check_compression(compression: str | None) -> str:
    """TensorFlow's name of a compression; "" if there is none.

    Raises:
        ConfigurationError: the compression is not known.
    """
    name = (compression or "").upper()
    if name not in COMPRESSIONS:
        raise ConfigurationError(f"compression={compression!r} is not known.", hint="None, 'GZIP' or 'ZLIB'")
    return name


def scan(path: str, compression: str) -> tuple[int, bytes | None, bytes | None, int]:
    """Scans a file from record to record; the data is skipped, or read if the file is compressed.

    Args:
        path: path of a local file, or a URL of one of TensorFlow's file systems.
        compression: "", "GZIP" or "ZLIB".

    Returns:
        The number of records, the first record, the last record (None if there is none), and the number of
        bytes of the decompressed file.

    Raises:
        DataError: the file cannot be read, is cut off or is damaged; the message names the file and the
        record.
    """
    with _raw(path) as raw:
        file = _content(raw, compression)
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
    """The length of a record, from its header."""
    if len(header) < _HEADER.size:
        raise _cut_off(path, record)
    length, checksum = _HEADER.unpack(header)
    # Checked before the length is used: a damaged length could lead anywhere in the file.
    if masked_crc32c(header[:8]) != checksum:
        raise DataError(
            f"{path} is not a TFRecord file, or is damaged: record {record} has a wrong checksum.",
            hint="write it again; if it is compressed, set compression='GZIP' or 'ZLIB'",
        )
    if length > _LONGEST_RECORD:
        raise DataError(
            f"Record {record} of {path} says that it has {length} bytes; no example can have more than "
            f"{_LONGEST_RECORD}.",
            hint="the file is damaged, or not of examples: write it again",
        )
    return int(length)


def _read(file: Any, count: int, path: str, record: int, *, at_end: bool = False) -> bytes:
    """The next `count` bytes; fewer only with `at_end`, if the file ends."""
    content = b""
    try:
        # Read in pieces, so that a false length allocates no memory.
        while len(content) < count and (piece := file.read(min(_PIECE, count - len(content)))):
            content = content + piece if content else bytes(piece)
    except (EOFError, OSError, zlib.error) as error:
        raise _cut_off(path, record) from error
    if len(content) < count and not at_end:
        raise _cut_off(path, record)
    return content


def _cut_off(path: str, record: int) -> DataError:
    return DataError(
        f"{path} is cut off or damaged in record {record}.",
        hint="copy or write the file again, or name its compression",
    )


def _size_of(file: Any) -> int:
    if hasattr(file, "size"):
        return int(file.size())
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return int(size)


def _content(raw: Any, compression: str) -> Any:
    """A file-like object over the decompressed content.

    TensorFlow reads all members of a GZIP file, as `cat a.gz b.gz` makes one, but only the first ZLIB stream.
    """
    if compression == "GZIP":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    return io.BufferedReader(_Inflated(raw)) if compression else raw


class _Inflated(io.RawIOBase):
    """The content of a ZLIB file, in pieces: as a whole it may be a thousand times as large."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._inflater = zlib.decompressobj()
        self._packed = b""

    def readable(self) -> bool:
        """Always True; `io.RawIOBase` asks for it."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` with the next bytes; returns their number, 0 at the end. EOFError if cut off."""
        while not self._inflater.eof:
            self._packed = self._packed or self._raw.read(_PIECE)
            chunk = self._inflater.decompress(self._packed, len(buffer))
            ended = not self._packed and not chunk
            self._packed = self._inflater.unconsumed_tail
            if chunk:
                buffer[: len(chunk)] = chunk
                return len(chunk)
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
            file = safe_files.open_to_read(path, links=True)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}.", hint="look at its name and rights"
        ) from error
    with file:
        yield file
