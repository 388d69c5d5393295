"""The storages of checkpoints by URL scheme: local files, and whatever TensorFlow's file systems support.

The order of the operations, and when a checkpoint is complete, are not decided here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.checkpoint import tensor_file
from dtrain.checkpoint.checkpoint_io import CheckpointIO
from dtrain.errors import ConfigurationError


class TensorFlowFiles(CheckpointIO):
    """Any file system of TensorFlow's, such as `gs://`; methods raise `OSError` or `tf.errors.OpError`."""

    def make_directories(self, path: str) -> None:
        """Creates a directory and its parents; an existing directory is no error."""
        _gfile().makedirs(path)

    def write(self, path: str, content: bytes) -> None:
        """Writes a new file in one operation."""
        with _gfile().GFile(path, "wb") as file:
            file.write(content)

    @contextlib.contextmanager
    def output(self, path: str) -> Iterator[tensor_file.Output]:
        """Opens a file that is written piece by piece."""
        with _gfile().GFile(path, "wb") as file:
            yield tensor_file.RemoteOutput(file)

    def read(self, path: str) -> bytes:
        """The content of a file."""
        with self._opened(path) as file:
            return bytes(file.read())

    def reader(self, path: str) -> Callable[[int, int], bytes]:
        """A function that reads bytes of a file: so many from a place."""

        def read(begin: int, size: int) -> bytes:
            with self._opened(path) as file:
                file.seek(begin)
                return bytes(file.read(size))

        return read

    def _opened(self, path: str) -> Any:
        return _gfile().GFile(path, "rb")

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


class LocalFiles(TensorFlowFiles):
    """Local files (without a scheme, or `file://`), written so that they survive a crash of the machine.

    Files are created anew, and only regular files are read: no link in a folder of checkpoints is followed.
    """

    local = True

    def make_directories(self, path: str) -> None:
        """Creates a directory and its parents; an existing directory is no error."""
        os.makedirs(_plain(path), exist_ok=True)  # noqa: PTH103

    def write(self, path: str, content: bytes) -> None:
        """Writes a new file; `FileExistsError` if anything is there."""
        with os.fdopen(safe_files.create(_plain(path)), "wb") as file:
            file.write(content)

    @contextlib.contextmanager
    def output(self, path: str) -> Iterator[tensor_file.Output]:
        """Opens a file that is written past the page cache."""
        with tensor_file.opened(_plain(path)) as output:
            yield output

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self.read_at_most(path, self.size(path))

    def _opened(self, path: str) -> Any:
        return safe_files.open_to_read(_plain(path))

    def read_at_most(self, path: str, most: int) -> bytes:
        """The content of a regular file; `UnsafeFileError` if it is something else, or larger."""
        return safe_files.read_bytes(_plain(path), most)

    def size(self, path: str) -> int:
        """The size of a regular file in bytes; `UnsafeFileError` if it is something else."""
        return safe_files.size(_plain(path))

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory."""
        return os.path.exists(_plain(path))  # noqa: PTH110

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; an empty list if there is no directory."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(_plain(path)))  # noqa: PTH208
        return []

    def is_link(self, path: str) -> bool:
        """Whether a path itself is a symbolic link."""
        return safe_files.is_link(_plain(path))

    def remove(self, path: str) -> None:
        """Deletes what is there, a directory too, but nothing that a link leads to."""
        safe_files.remove(_plain(path))

    def remove_directory(self, path: str) -> None:
        """As `remove`."""
        safe_files.remove(_plain(path))

    def remove_if_empty(self, path: str) -> None:
        """Deletes a directory that has no content; everything else at the path stays, without an error."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a link is no directory, too
            try:
                os.rmdir(_plain(path))  # noqa: PTH106
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def sync(self, path: str) -> None:
        """Waits until a file or directory is on the disk."""
        handle = os.open(_plain(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opened only to be synced
        try:
            os.fsync(handle)
        except OSError as error:
            # Some mounted file systems do not support this, above all for directories.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def write_whole(self, path: str, content: bytes) -> None:
        """Writes a file atomically: even after a machine crash, it is complete or does not exist."""
        beside = f"{path}.{secrets.token_hex(8)}.part"
        self.write(beside, content)
        self.sync(beside)
        self.move(beside, path)
        self.sync(path.rpartition("/")[0] or ".")

    def move(self, source: str, target: str) -> None:
        """Renames a file atomically; an existing file of that name is replaced."""
        Path(_plain(source)).replace(_plain(target))

    def absolute(self, path: str) -> str:
        """The path from the root, without a scheme."""
        return os.path.abspath(_plain(path))  # noqa: PTH100


STORAGES: dict[str, CheckpointIO] = {"file": LocalFiles()}
"""The storages by URL scheme. `file` is also for paths without one; TensorFlow has the others."""

_OTHERS = TensorFlowFiles()


def register(scheme: str, storage: CheckpointIO) -> None:
    """Add a storage, on all workers.

    Args:
        scheme: what stands before `://` in its paths.
        storage: an instance of a subclass of `CheckpointIO`.

    Raises:
        ConfigurationError: a storage of this scheme is registered already.
    """
    if scheme in STORAGES:
        raise ConfigurationError(f"There is a storage for {scheme}:// already.", hint="Take another scheme.")
    STORAGES[scheme] = storage


def storage_of(path: str) -> CheckpointIO:
    """The storage of a path, which may be a URL."""
    scheme, separator, _ = path.partition("://")
    return STORAGES.get(scheme, _OTHERS) if separator else STORAGES["file"]


def join(directory: str, name: str) -> str:
    """Joins a directory, which may be a URL, and a name to a path."""
    return f"{directory.rstrip('/')}/{name}" if directory.rstrip("/") else f"/{name}"


def _plain(path: str) -> str:
    return path.removeprefix("file://")


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile
