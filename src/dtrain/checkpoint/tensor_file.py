"""Writes tensors one after another to a file, bypassing the page cache where the file system allows it.

A checkpoint is read once in a thousand writes, and copying it into the cache costs several times the
processor time that the disk needs. The caller must keep the list of tensors and checksums; it is not in the
file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dtrain.base import safe_files
from dtrain.base.counts import is_count
from dtrain.checkpoint.layout import HINT
from dtrain.errors import CheckpointError

_CHUNK = 1 << 20  # bytes in one write: a multiple of any disk's block size
_PIECE = 256 << 10  # bytes that stay in the processor's cache between the checksum and the copy
_MODE = 0o644
_DIRECT = os.O_DIRECT


class Output(Protocol):
    """A file that bytes can be appended to."""

    def write(self, content: memoryview) -> None:
        """Appends bytes."""


def write(output: Output, tensors: dict[str, Any]) -> list[dict[str, Any]]:
    """Writes tensors, and returns the list of what was written.

    Args:
        output: an empty file.
        tensors: eager tensors by name, of any shape, of strings or of any dtype of numbers. Each is taken
            out when it is written: TensorFlow copies a variable that is assigned while a tensor uses it.

    Returns:
        For each tensor its `name`, `dtype`, `shape`, `size` in bytes and `checksum`, in the file's order.
    """
    entries = []
    for name in [*tensors]:
        tensor = tensors.pop(name)
        content = _bytes_of(tensor)
        checksum = 0
        for at in range(0, len(content), _PIECE):
            piece = content[at : at + _PIECE]
            checksum = zlib.crc32(piece, checksum)
            output.write(piece)
        entries.append(
            {
                "name": name,
                "dtype": tensor.dtype.name,
                "shape": tensor.shape.as_list(),
                "size": len(content),
                "checksum": checksum,
            }
        )
    return entries


def size_of(entries: Any) -> int:
    """The size of the file that has these tensors, in bytes.

    Raises:
        ValueError: this is no list that `write` returned.
    """
    if not (isinstance(entries, list) and all(map(_is_entry, entries))):
        raise ValueError("its index does not describe tensors")
    return sum(entry["size"] for entry in entries)


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("name", "dtype"))
        and all(is_count(entry.get(name)) for name in ("size", "checksum"))
        and isinstance(entry.get("shape"), list)
        and all(map(is_count, entry["shape"]))
    )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which is read each time that it is asked for.

    Attributes:
        path: the file.
        entry: what `write` returned of it, as `size_of` accepts it.
        begin: its first byte in the file.
        reader: returns bytes of the file: so many from a place.
    """

    path: str
    entry: Mapping[str, Any]
    begin: int
    reader: Callable[[int, int], bytes]

    def read(self) -> Any:
        """The tensor, on the CPU.

        Raises:
            CheckpointError: it cannot be read, its checksum is wrong, or it is not as described.
        """
        import tensorflow as tf

        try:
            content = self.reader(self.begin, self.entry["size"])
        except (tf.errors.OpError, OSError, MemoryError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}", hint=HINT) from error
        name = self.entry["name"]
        problem = f"the checksum of {name} is wrong"
        if (len(content), zlib.crc32(content)) == (self.entry["size"], self.entry["checksum"]):
            try:
                return _tensor_of(content, self.entry["dtype"], self.entry["shape"])
            except Exception as error:  # of a wrong dtype or shape, or of bytes that are no tensor
                problem = f"{name} cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(f"{self.path} was changed: {problem}.", hint=HINT)


def _bytes_of(tensor: Any) -> memoryview:
    """The bytes of a tensor: for numbers, the tensor's own memory without a copy."""
    import tensorflow as tf

    if tensor.dtype == tf.string:
        with tf.device("CPU:0"):
            return memoryview(tf.io.serialize_tensor(tensor).numpy())
    if not tensor.dtype.as_numpy_dtype.__module__.startswith("numpy"):
        with tf.device("CPU:0"):  # Python's buffers do not support bfloat16 and the like
            tensor = tf.bitcast(tensor, tf.uint8)
    content: Any = np.asarray(memoryview(tensor)).reshape(-1).view(np.uint8)
    return memoryview(content)


def _tensor_of(content: bytes, dtype: str, shape: Sequence[int]) -> Any:
    import tensorflow as tf

    kind = tf.as_dtype(dtype)
    with tf.device("CPU:0"):
        if kind == tf.string:
            described = type(tf.make_tensor_proto("")).FromString(content)
            # A few bytes could declare a tensor of any size: its last text would be repeated.
            if len(described.string_val) != math.prod(shape):
                raise ValueError("it has another number of texts than its shape")
            return tf.reshape(tf.io.parse_tensor(content, tf.string), shape)
        return tf.constant(np.frombuffer(content, np.uint8).view(kind.as_numpy_dtype).reshape(shape))


class RemoteOutput:
    """An output file on a file system that is not local.

    Args:
        file: a `tf.io.gfile.GFile`, open for writing.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: memoryview) -> None:
        """Appends bytes."""
        self._file.write(bytes(content))


@contextlib.contextmanager
def opened(path: str) -> Iterator[Output]:
    """Opens a new local file for output; `FileExistsError` if anything is there."""
    handle = safe_files.create(path, mode=_MODE)
    try:
        output = _Chunks(handle)
        yield output
        output.finish()
    finally:
        os.close(handle)


class _Chunks:
    """Writes full chunks directly to the disk from a page-aligned buffer, and the rest through the cache."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._memory = mmap.mmap(-1, _CHUNK)  # page-aligned, as direct writes require
        self._view = memoryview(self._memory)
        self._filled = 0
        self._direct = False
        self._can_be = True

    def write(self, content: memoryview) -> None:
        """Appends bytes."""
        while content:
            part = content[: _CHUNK - self._filled]
            self._view[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == _CHUNK:
                self._past_the_cache(True)
                self._flush()

    def finish(self) -> None:
        """Writes the rest, and frees the buffer."""
        self._past_the_cache(False)
        self._flush()
        self._view.release()
        self._memory.close()

    def _flush(self) -> None:
        rest, self._filled = self._view[: self._filled], 0
        while rest:
            try:
                rest = rest[os.write(self._handle, rest) :]
            except OSError as error:
                # Some file systems accept the flag but not the write; none can after an incomplete block.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._past_the_cache(False)
                self._can_be = False

    def _past_the_cache(self, wanted: bool) -> None:
        if not self._can_be or wanted == self._direct:
            return
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
        except OSError:
            self._can_be = False  # this file system does not support the flag
            return
        self._direct = wanted
