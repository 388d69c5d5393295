"""Runs a user's script as the main program of a process that observes it.

It decides neither how long the script runs nor what is observed; the programs that call it do.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from dtrain.base.user_lines import line_of_user

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
