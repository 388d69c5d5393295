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
        ConfigurationError: the value is no path, is empty, contains a NUL character, or is not UTF-8, which
            TensorFlow needs.
    """
    text: object = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text or not _is_utf8(text):
        raise ConfigurationError(
            f"{name}={path!r} is not a path.", hint=f"set {name} to the path of a folder, in UTF-8"
        )
    return text


def _is_utf8(text: str) -> bool:
    """Whether a text has no surrogates, as Python decodes the bytes of a file name in another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
