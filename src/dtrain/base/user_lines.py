"""Finds the lines of the user's own code, and those of Keras' layers, in stacks."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_INSTALLED = frozenset(("site-packages", "dist-packages"))
_NO_PARTS = tuple(f"src/{package}/" for package in ("backend", "utils", "ops", "trainers"))


def line_of_user(frames: Iterable[Any]) -> str:
    """The innermost line of the user's own code, as `file.py:12`; "" if there is none.

    Args:
        frames: frames of a stack, the innermost last, with `filename` and `lineno`.
    """
    others = _others()
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(others):
            path = Path(frame.filename)
            return f"{os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path}:{frame.lineno}"
    return ""


def line_of_keras(frames: Iterable[Any]) -> str:
    """The innermost line of Keras' layers, losses, metrics or optimizers; "" if it calls the user's code."""
    folder, others = _folder("keras"), _others()
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(others):
            return ""
        name = frame.filename.removeprefix(folder)
        if folder and name != frame.filename and not name.startswith(_NO_PARTS):
            return f"keras/{name}:{frame.lineno}"
    return ""


def is_of_library(filename: str) -> bool:
    """Whether a file is one of dtrain, Keras, TensorFlow, Python or an installed package.

    A package whose module the user runs by `-m` is the user's own, even if it is installed.
    """
    if filename.startswith(tuple(filter(None, map(_folder, ("dtrain", "keras", "tensorflow"))))):
        return True
    main = (getattr(sys.modules["__main__"], "__package__", None) or "").partition(".")[0]
    if main and filename.startswith(_folder(main) or "\0"):
        return False
    installed = not _INSTALLED.isdisjoint(Path(filename).parts)
    return installed or filename.startswith(("<frozen ", sysconfig.get_paths()["stdlib"]))


def _others() -> tuple[str, ...]:
    """The prefixes of the paths of files that are not the user's."""
    folders = map(_folder, ("dtrain", "keras", "tensorflow"))
    return ("<", sysconfig.get_paths()["stdlib"], *filter(None, folders))


def _folder(package: str) -> str:
    """The folder of an imported package, with a separator at its end; "" if it is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return f"{Path(file).parent}{os.sep}" if file else ""
