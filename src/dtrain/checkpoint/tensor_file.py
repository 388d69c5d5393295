"""Tensors one after another in a file, written past the page cache where the file system allows it.

A checkpoint is read once in a thousand writes, and copying it into the cache costs the training several times
the processor time that the disk needs. Where each tensor lies, and its checksum, is the caller's to keep.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_CHUNK = 1 << 20  # bytes that are written at once: a multiple of any disk's block
_PIECE = 256 << 10  # bytes that are still in the processor's cache when they are used again
_MODE = 0o644
_DIRECT = getattr(os, "O_DIRECT", 0) if fcntl is not None else 0


class Output(Protocol):
    """What a file has to do."""

    def write(self, content: memoryview) -> None:
        """Write bytes after those that are there."""


def write(output: Output, tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write tensors, and say what was written.

    Args:
        output: an empty file.
        tensors: eager tensors of any shape, by name: of strings or of any type of numbers.

    Returns:
        For each tensor its `name`, `dtype`, `shape`, `size` in bytes and `checksum`, in the file's order.
    """
    entries = []
    for name, tensor in tensors.items():
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


def read(content: Any, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors that a file holds, by name, on the CPU.

    Args:
        content: all bytes of the file.
        entries: what `write` has returned.

    Raises:
        ValueError: a tensor is not as it was written; it is named.
    """
    found: dict[str, Any] = {}
    everything, at = memoryview(content).cast("B"), 0
    for entry in entries:
        part = everything[at : at + entry["size"]]
        at += entry["size"]
        if len(part) != entry["size"] or zlib.crc32(part) != entry["checksum"]:
            raise ValueError(f"the checksum of {entry['name']} is wrong")
        found[entry["name"]] = _tensor_of(part, entry["dtype"], entry["shape"])
    return found


def _bytes_of(tensor: Any) -> memoryview:
    """A tensor as bytes: its own memory where it is one of numbers."""
    import tensorflow as tf

    if tensor.dtype == tf.string:
        with tf.device("CPU:0"):
            return memoryview(tf.io.serialize_tensor(tensor).numpy())
    if not tensor.dtype.as_numpy_dtype.__module__.startswith("numpy"):
        with tf.device("CPU:0"):  # Python does not know how to look into bfloat16 and its like
            tensor = tf.bitcast(tensor, tf.uint8)
    content: Any = np.asarray(memoryview(tensor)).reshape(-1).view(np.uint8)
    return memoryview(content)


def _tensor_of(content: memoryview, dtype: str, shape: Sequence[int]) -> Any:
    import tensorflow as tf

    kind = tf.as_dtype(dtype)
    with tf.device("CPU:0"):
        if kind == tf.string:
            return tf.io.parse_tensor(bytes(content), tf.string)
        return tf.constant(np.frombuffer(content, np.uint8).view(kind.as_numpy_dtype).reshape(shape))


class Elsewhere:
    """A file of another file system.

    Args:
        file: of TensorFlow's, open for writing.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: memoryview) -> None:
        """Write bytes after those that are there."""
        self._file.write(bytes(content))


@contextlib.contextmanager
def opened(path: str) -> Iterator[Output]:
    """A new local file; one that is there is replaced."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
    try:
        output = _Chunks(handle)
        yield output
        output.finish()
    finally:
        os.close(handle)


class _Chunks:
    """Whole chunks go to the disk from one piece of memory that lies as it wants; what is left goes last."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._memory = mmap.mmap(-1, _CHUNK)  # at a page's beginning, as a disk wants it
        self._view = memoryview(self._memory)
        self._filled = 0
        self._direct = False
        self._can_be = bool(_DIRECT)

    def write(self, content: memoryview) -> None:
        """Write bytes after those that are there."""
        while content:
            part = content[: _CHUNK - self._filled]
            self._view[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == _CHUNK:
                self._past_the_cache(True)
                self._flush()

    def finish(self) -> None:
        """Write what is left."""
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
                # Not all file systems that take the flag can do it, nor can any after a part of a block.
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
            self._can_be = False  # on this file system
            return
        self._direct = wanted
