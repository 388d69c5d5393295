"""The file operations that checkpoints are made of, on any path that TensorFlow's file systems know.

What is whole and in which order it is written is not decided here. All of them go through one object,
`files`, so that a test can put another in its place and stop a process at any of them.
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
    """Plain operations; all raise `OSError` or `tf.errors.OpError`."""

    def make_directories(self, path: str) -> None:
        """Make a directory and those above it; one that is there is left as it is."""
        _gfile().makedirs(path)

    def write_tensors(self, prefix: str, tensors: Mapping[str, Any]) -> None:
        """Write tensors to `<prefix>.data`, and where they lie in it to `<prefix>.index`.

        Args:
            prefix: a path.
            tensors: eager tensors of any shape, of strings or numbers.
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
        """The tensors by name, on the CPU.

        Raises:
            CheckpointError: one is not as it was written.
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
        """Write a file in one go; one that is there is replaced."""
        with _gfile().GFile(path, "wb") as file:
            file.write(content)

    def sync(self, path: str) -> None:
        """Wait until a local file or directory is on the disk; others do that when a file is closed."""
        local = _local(path)
        if local is None:
            return
        handle = os.open(local, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some mounted file systems know no such thing, for directories above all.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def move(self, source: str, target: str) -> None:
        """Give a local file another name at once, in the place of what has that name."""
        Path(_local(source) or source).replace(_local(target) or target)

    def remove(self, path: str) -> None:
        """Delete a file; none there is as good."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.NotFoundError):
            _gfile().remove(path)

    def remove_directory(self, path: str) -> None:
        """Delete a directory and what is left in it; none there is as good."""
        import tensorflow as tf

        with contextlib.suppress(tf.errors.NotFoundError):
            _gfile().rmtree(path)

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing where there is none."""
        import tensorflow as tf

        try:
            return sorted(name.rstrip("/") for name in _gfile().listdir(path))
        except tf.errors.NotFoundError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is a file."""
        return bool(_gfile().exists(path))

    def size(self, path: str) -> int:
        """The length of a file in bytes."""
        return int(_gfile().stat(path).length)

    def read(self, path: str) -> bytes:
        """All of a file."""
        with _gfile().GFile(path, "rb") as file:
            return bytes(file.read())


files = Files()
"""What all of `dtrain.checkpoint.store` goes through; looked up at each use."""


def write_whole(path: str, content: bytes) -> None:
    """Write a small file so that it is there whole, after a crash of the machine too, or not at all.

    Where names cannot be changed at once, as in object stores, it is one write, and what reads it must be
    able to tell whether it is whole.
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
    """The path of a name in a directory, which may be a URL."""
    return f"{directory.rstrip('/')}/{name}" if directory.rstrip("/") else f"/{name}"


def _local(path: str) -> str | None:
    """The path as the operating system knows it; None if it is not one of its files."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return path
    return rest if scheme == "file" else None


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile
