"""Formats an uncaught exception with the frames of the user's own code, as a task shows it.

Between two of these, a call of `fit` has dozens of frames of dtrain, Keras and TensorFlow. It shows nothing
itself; `task_hooks` does.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from dtrain.base.user_lines import is_of_library
from dtrain.base.words import counted


def format_exception(error: BaseException, *, complete: bool = False) -> str:
    """The text of an exception and its causes, as Python shows them, without the frames of libraries.

    All frames are shown if none is the user's: the error is then a library's own, such as one in a recipe.

    Args:
        error: the exception, with its traceback.
        complete: whether to show all frames.
    """
    shown = traceback.TracebackException.from_exception(error)
    parts = [*_parts(shown)]
    frames = [frame for part in parts for frame in part.stack]
    own = [frame for frame in frames if not is_of_library(frame.filename)]
    left_out = 0 if complete or not own else len(frames) - len(own)
    note = ""
    if left_out:
        for part in parts:
            part.stack[:] = [frame for frame in part.stack if not is_of_library(frame.filename)]
        note = f"dtrain: {counted(left_out, 'frame')} of libraries left out; --traceback shows all.\n"
    return note + "".join(shown.format())


def _parts(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """An exception, those that it was raised from, and those that it groups."""
    waiting = [shown]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [each for each in (part.__cause__, part.__context__, *(part.exceptions or ())) if each]
