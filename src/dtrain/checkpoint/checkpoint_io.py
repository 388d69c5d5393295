"""The base class of storages for checkpoints: how the files of checkpoints are read and written.

The storages are in `storages`; to add one, write a subclass, and add an instance by `storages.register`.
When a checkpoint is complete, and in which order its files are written, is the store's task.
"""

from __future__ import annotations

import abc
import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from dtrain.checkpoint import layout, tensor_file
from dtrain.errors import CheckpointError


class CheckpointIO(abc.ABC):
    """A kind of storage. Paths are URLs of its scheme, with slashes; methods raise `OSError` on failure."""

    local: ClassVar[bool] = False
    """Whether paths are those of this machine, where other workers may see other files."""

    @abc.abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Writes a new file; when it returns, other processes can read the content."""

    @abc.abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file."""

    def read_at_most(self, path: str, most: int) -> bytes:
        """The content of a file; `CheckpointError` if it has more bytes than that."""
        size = self.size(path)
        if size > most:
            raise CheckpointError(
                f"{path} has {size} bytes; a file of its kind has at most {most}.", hint=layout.HINT
            )
        return self.read(path)

    def reader(self, path: str) -> Callable[[int, int], bytes]:
        """A function that returns bytes of a file: so many from a place. This one keeps the whole content."""
        content = self.read(path)
        return lambda begin, size: content[begin : begin + size]

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """The size of a file in bytes."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file, or a directory that is not empty."""

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """The sorted names of files and directories in a directory; an empty list if there is none."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Deletes a file; a missing file is no error."""

    @abc.abstractmethod
    def remove_directory(self, path: str) -> None:
        """Deletes a directory with its content; a missing directory is no error."""

    def remove_if_empty(self, path: str) -> None:
        """Deletes a directory that has no content; everything else at the path stays, without an error."""
        if self.exists(path) and not self.names(path):
            self.remove_directory(path)

    def is_link(self, path: str) -> bool:
        """Whether a path itself is a symbolic link, if the storage has such."""
        return False

    def make_directories(self, path: str) -> None:  # noqa: B027 - optional
        """Creates a directory and its parents, if the storage has directories."""

    def sync(self, path: str) -> None:  # noqa: B027 - optional
        """Waits until a file or directory is on the disk, if `write` does not."""

    def write_whole(self, path: str, content: bytes) -> None:
        """Writes a small file so that readers find all of it or none, if the storage can."""
        self.write(path, content)

    @contextlib.contextmanager
    def output(self, path: str) -> Iterator[tensor_file.Output]:
        """Opens a file to which the tensors of a share are appended."""
        with io.BytesIO() as buffer:
            yield buffer  # type: ignore[misc]
            self.write(path, buffer.getvalue())

    def absolute(self, path: str) -> str:
        """The path as it is used from every working directory."""
        return path

    def write_tensors(self, prefix: str, tensors: dict[str, Any]) -> None:
        """Writes tensors to `<prefix>.data`, and the list of them to `<prefix>.index`; empties `tensors`."""
        index, data = layout.tensor_files(prefix)
        with self.output(data) as output:
            entries = tensor_file.write(output, tensors)
        self.write(index, layout.encode({"version": layout.VERSION, "tensors": entries}))

    def read_tensors(self, prefix: str) -> dict[str, tensor_file.StoredTensor]:
        """The tensors that `write_tensors` wrote, by name; `CheckpointError` if that is not their list."""
        index, data = layout.tensor_files(prefix)
        entries: Any = layout.decode(self.read_at_most(index, layout.MOST_BYTES), index).get("tensors")
        try:
            whole = tensor_file.size_of(entries)
        except ValueError as error:
            raise CheckpointError(f"{data} was changed: {error}.", hint=layout.HINT) from error
        if self.size(data) != whole:
            raise CheckpointError(f"{data} was changed: it does not have {whole} bytes.", hint=layout.HINT)
        reader = self.reader(data)
        begins = itertools.accumulate((entry["size"] for entry in entries), initial=0)
        return {
            entry["name"]: tensor_file.StoredTensor(data, entry, begin, reader)
            for entry, begin in zip(entries, begins, strict=False)
        }
