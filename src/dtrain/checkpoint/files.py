"""The file operations for checkpoints, on any path that TensorFlow's file systems support.

All operations go through one object, `files`, so that a test can replace it and stop a process at any
operation. The order of the operations, and when a checkpoint is complete, are not decided here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.checkpoint import layout, tensor_file
from dtrain.errors import CheckpointError


class Files:
    """Basic file operations; all raise `OSError` or `tf.errors.OpError` on failure."""

    def make_directories(self, path: str) -> None:
        """Creates a directory and its parents; an existing directory is no error."""
        _gfile().makedirs(path)

    def write_tensors(self, prefix: str, tensors: Mapping[str, Any]) -> None:
        """Writes tensors to `<prefix>.data`, and the list of them to `<prefix>.index`.

        Args:
            prefix: a path without a suffix.
            tensors: eager tensors by name, of any shape, of strings or numbers.
        """
        index, data = layout.tensor_files(prefix)
        local = _local(data)
        if local is None:
            with _gfile().GFile(data, "wb") as file:
                entries = tensor_file.write(tensor_file.Elsewhere(file), tensors)
        else:
            with tensor_file.opened(local) as output:
                entries = tensor_file.write(output, tensors)
        self.write(index, layout.encode({"version": layout.VERSION, "tensors": entries}))

    def read_tensors(self, prefix: str) -> dict[str, Any]:
        """Reads the tensors that `write_tensors` wrote, by name, on the CPU.

        Raises:
            CheckpointError: the index or a tensor was changed.
        """
        index, data = layout.tensor_files(prefix)
        entries = layout.decode(self.read(index), index)["tensors"]
        local = _local(data)
        content = self.read(data) if local is None else np.fromfile(local, np.uint8)
        try:
            return tensor_file.read(content, entries)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{data} was changed: {error}.", hint=layout.HINT) from error

    def write(self, path: str, content: bytes) -> None:
        """Writes a file in one operation; an existing file is replaced."""
        with _gfile().GFile(path, "wb") as file:
            file.write(content)

    def sync(self, path: str) -> None:
        """Waits until a local file or directory is on the disk; other file systems do so at closing."""
        local = _local(path)
        if local is None:
            return
        handle = os.open(local, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some mounted file systems do not support this, above all for directories.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def move(self, source: str, target: str) -> None:
        """Renames a local file atomically; an existing file of that name is replaced."""
        Path(_local(source) or source).replace(_local(target) or target)

    def remove(self, path: str) -> None:
        """Deletes a file; a missing file is no error."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.NotFoundError):
            _gfile().remove(path)

    def remove_directory(self, path: str) -> None:
        """Deletes a directory with its content; a missing directory is no error."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.NotFoundError):
            _gfile().rmtree(path)

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; an empty list if there is no directory."""
        import tensorflow as tf

        try:
            return sorted(name.rstrip("/") for name in _gfile().listdir(path))
        except tf.errors.NotFoundError:
            return []

    def exists(self, path: str) -> bool:
        """Whether a file or directory exists."""
        return bool(_gfile().exists(path))

    def size(self, path: str) -> int:
        """The size of a file in bytes."""
        return int(_gfile().stat(path).length)

    def read(self, path: str) -> bytes:
        """Reads a whole file."""
        with _gfile().GFile(path, "rb") as file:
            return bytes(file.read())


files = Files()
"""The object that all file operations of checkpoints go through; callers look it up at each use."""


def write_whole(path: str, content: bytes) -> None:
    """Writes a small file atomically: even after a machine crash, it is complete or does not exist.

    A file system that cannot rename atomically, such as an object store, gets one plain write. So a reader
    must be able to detect an incomplete file.
    """
    if _local(path) is None:
        files.write(path, content)
        return
    beside = f"{path}.part"
    files.write(beside, content)
    files.sync(beside)
    files.move(beside, path)
    files.sync(path.rpartition("/")[0] or ".")


def join(directory: str, name: str) -> str:
    """Joins a directory, which may be a URL, and a name to a path."""
    return f"{directory.rstrip('/')}/{name}" if directory.rstrip("/") else f"/{name}"


def _local(path: str) -> str | None:
    """The local path of `path`; None if it is not a local file."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return path
    return rest if scheme == "file" else None


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile
