"""Validates paths where they are given. It opens no file: `safe_files` does."""

from __future__ import annotations

import os
from pathlib import Path

from dtrain.errors import ConfigurationError


def checked_path(name: str, path: str | os.PathLike[str]) -> str:
    """A path as text.

    Args:
        name: the name of the argument that gave the path, for the error.
        path: the path.

    Raises:
        ConfigurationError: the value is no path, is empty, or contains a NUL character.
    """
    found: object = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(found, str) or not found or "\0" in found:
        raise ConfigurationError(
            f"{name}={path!r} is not a path.", hint=f"set {name} to the path of a folder"
        )
    return found


def check_script(path: str) -> None:
    """Check that there is a script, which may be a directory or a zip file with a `__main__`.

    Raises:
        ConfigurationError: there is nothing at this path.
    """
    if not Path(path).exists():
        raise ConfigurationError(
            f"There is no script {path!r} in {Path.cwd()}.",
            hint="Check the path, or write -m before the name of a module.",
        )
