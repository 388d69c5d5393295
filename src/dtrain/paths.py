"""Refuses paths that no file system takes, where they are given and not where they are first used.

What lies at a path is the business of who reads or writes it.
"""

from __future__ import annotations

import os

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
