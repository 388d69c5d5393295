"""Reads, writes and deletes files in folders to which others may have written: a file there may be anything.

Only regular files are opened, reads have a limit, and links are not followed unless the caller allows it.
A link in the folder's own path is the user's choice, and is followed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.errors import UnsafeFileError

Place = str | os.PathLike[str]

_ALWAYS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # opening a FIFO or a device must neither wait nor act
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_NAME = 100  # characters of the name in that of a temporary file
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Place, flags: int = os.O_RDONLY, *, mode: int = 0o666, links: bool = False) -> int:
    """Opens a regular file.

    Args:
        path: the file.
        flags: as for `os.open`, without `O_TRUNC`, which would act before the file is examined.
        mode: the permissions of a file that `O_CREAT` creates.
        links: whether `path` itself may be a symbolic link.

    Returns:
        The descriptor.

    Raises:
        UnsafeFileError: it is no regular file; or it is to be written to and has several names (hard links),
            of which another may belong elsewhere.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | _ALWAYS | (0 if links else os.O_NOFOLLOW), mode)
    except OSError as error:
        # ELOOP: a link. ENXIO, ENODEV: a socket, a FIFO without a reader, a device without a driver.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise _unsafe(path, os.lstat(path).st_mode) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unsafe(path, status.st_mode)
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise _linked(path, status.st_nlink)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_read(path: Place, *, links: bool = False) -> io.BufferedReader:
    """Opens a regular file to read it in parts; as `open_regular`."""
    return os.fdopen(open_regular(path, links=links), "rb")


def check_regular(path: Place) -> None:
    """Checks a file that is read by others' code, which would wait for a FIFO; a link to a file is allowed.

    Raises:
        UnsafeFileError: it is no regular file.
        OSError: it cannot be opened.
    """
    os.close(open_regular(path, links=True))


def unsafe_in(path: Place, *, folder: bool) -> UnsafeFileError | None:
    """The first problem of a path, or below it: what is no folder, and no regular file with a single name.

    What is not there, or cannot be listed, has none.

    Args:
        path: the path.
        folder: whether it may be a folder.
    """
    waiting = [os.fspath(path)]
    while waiting:
        path = waiting.pop()
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode) and not folder:
                return _unsafe(path, status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                waiting += [os.path.join(path, name) for name in os.listdir(path)]  # noqa: PTH118, PTH208
            elif not stat.S_ISREG(status.st_mode):
                return _unsafe(path, status.st_mode)
            elif status.st_nlink > 1:
                return _linked(path, status.st_nlink)
    return None


def read_bytes(path: Place, most: int, *, links: bool = False) -> bytes:
    """The content that a regular file has when it is opened; what is appended meanwhile is left out.

    Args:
        path: the file.
        most: the limit of its size in bytes.
        links: whether `path` itself may be a symbolic link.

    Raises:
        UnsafeFileError: it is no regular file, or larger.
        OSError: it cannot be read.
    """
    with open_to_read(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UnsafeFileError(
                path,
                f"it has {size} bytes, and a file of this kind has at most {most}",
                hint="It is damaged, or another kind of file.",
            )
        return file.read(size)


def read_text(path: Place, most: int, *, links: bool = False) -> str:
    """The text of a regular file; as `read_bytes`, and `UnicodeDecodeError` if it is not UTF-8."""
    return read_bytes(path, most, links=links).decode("utf-8")


def read_json(path: Place, most: int, *, links: bool = False) -> Any:
    """The value in a file of JSON; as `read_bytes`, and `ValueError` if it is not JSON."""
    return parse_json(read_bytes(path, most, links=links))


def parse_json(content: bytes | str) -> Any:
    """The value in a JSON text.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def size(path: Place) -> int:
    """The size of a regular file in bytes.

    Raises:
        UnsafeFileError: it is no regular file.
        OSError: there is none.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _unsafe(path, status.st_mode)
    return status.st_size


def create(path: Place, *, mode: int = 0o666) -> int:
    """Creates a new file for writing, and returns its descriptor; `FileExistsError` if anything is there."""
    return os.open(path, _NEW, mode)


def open_new(path: Place, *, mode: int = 0o666) -> BinaryIO:
    """Opens a new file for writing, in the place of a file or link that is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108
    return os.fdopen(create(path, mode=mode), "wb")


def open_to_append(path: Place) -> BinaryIO:
    """Opens a regular file to append to it; it is created if there is none."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


@contextlib.contextmanager
def replacing(path: Place) -> Iterator[BinaryIO]:
    """Opens a new file, which at the end takes the place of `path` in one step.

    A link at `path` is replaced itself. If the `with` block raises, `path` stays as it is.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name[:_LONGEST_NAME]}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(create(unfinished), "wb") as file:
            yield file
        unfinished.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def write_text(path: Place, text: str) -> None:
    """Writes a text to a file, in one step, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def remove(path: Place, *, ignore_errors: bool = False) -> None:
    """Deletes a file, or a folder with its content; never what a link leads to. A missing one is no error.

    Args:
        path: the file or the folder.
        ignore_errors: whether to leave what cannot be deleted, instead of raising.

    Raises:
        OSError: something cannot be deleted.
    """
    ignored = (OSError,) if ignore_errors else (FileNotFoundError, NotADirectoryError)
    with contextlib.suppress(*ignored):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108
            return
        try:
            shutil.rmtree(path, ignore_errors=ignore_errors)
        except RecursionError:
            raise UnsafeFileError(path, "it is nested too deeply", hint="Delete it by rm -r.") from None


def is_link(path: Place) -> bool:
    """Whether a path itself is a symbolic link."""
    return os.path.islink(path)  # noqa: PTH114


def _unsafe(path: Place, mode: int) -> UnsafeFileError:
    if stat.S_ISDIR(mode):
        return UnsafeFileError(path, os.strerror(errno.EISDIR), hint="Put a file in its place.")
    kind = next((name for test, name in _KINDS if test(mode)), "something else")
    hint = "Delete it, or put a file in its place."
    return UnsafeFileError(path, f"it is {kind}, not a regular file", hint=hint)


def _linked(path: Place, names: int) -> UnsafeFileError:
    return UnsafeFileError(
        path,
        f"it has {names} names (hard links), and writing to it would change another file",
        hint="Delete this name of it, or use another folder.",
    )
