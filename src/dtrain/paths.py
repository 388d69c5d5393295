"""Refuses paths that no file system takes where they are given, and replaces files as a whole.

What lies at a path is the business of who reads or writes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dtrain.errors import ConfigurationError


def checked_path(name: str, path: str | os.PathLike[str]) -> str:
    """A path as text.

    Args:
        name: of the argument that it was given as.
        path: the path.

    Raises:
        ConfigurationError: it is no path, is empty or holds a NUL.
    """
    found: object = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(found, str) or not found or "\0" in found:
        raise ConfigurationError(f"{name}={path!r} is no path.", hint=f"set {name} to the path of a folder")
    return found


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path beside a file, to write to; it replaces the file when the block ends without an error."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
