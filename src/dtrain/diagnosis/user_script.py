"""Runs a user's script as the main program of a process that observes it, and finds its lines in stacks.

It decides neither how long the script runs nor what is observed; the programs that call it do.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_NO_PARTS = tuple(f"src/{each}/" for each in ("backend", "utils", "ops", "trainers"))

IS_MODULE = "-m"
"""The first word of a command line whose second word is the name of a module."""


def run_script(command: Sequence[str]) -> None:
    """Runs a script, or after `-m` a module, as `python` would run it with these arguments.

    Raises:
        BaseException: what the script raises.
    """
    if command[0] == IS_MODULE:
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def ends_well(error: BaseException) -> bool:
    """Whether an exception that ends a script is an exit with status 0."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def described(error: BaseException) -> str:
    """An exception that ends a script, in one sentence, with the line of the user's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = line_of_user(frames)
    return f"{_text_of(error)} ({line})" if line else _text_of(error)


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the script ended itself: {error.code}"
    text = getattr(error, "message", None) or next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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


def _others() -> tuple[str, ...]:
    """The prefixes of the paths of files that are not the user's."""
    folders = map(_folder, ("dtrain", "keras", "tensorflow"))
    return ("<", sysconfig.get_paths()["stdlib"], *filter(None, folders))


def _folder(package: str) -> str:
    """The folder of an imported package, with a separator at its end; "" if it is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return f"{Path(file).parent}{os.sep}" if file else ""
