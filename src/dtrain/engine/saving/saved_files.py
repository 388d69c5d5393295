"""Makes saving safe when every worker saves: each writes beside the target, then moves the file there.

No worker waits for another, so a save by the chief alone works too. What the files contain is Keras' own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.log import logger
from dtrain.engine.saving.scratch import scratch_beside
from dtrain.interfaces.managed_strategy import layout_of, managed
from dtrain.upstream import keras_models, keras_names
from dtrain.upstream.tf_variables import creation_number

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def save(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A model's `save`, `save_weights` and `export`; a user's own may have other arguments than Keras'."""
    strategy = keras_models.strategy_of(self)
    # An export also traces the model; the other two only write the values of its variables.
    asynchronous = managed(strategy).asynchronous
    is_export = original.__name__ == keras_names.MODEL_EXPORT.name
    if asynchronous is not None and not is_export:
        with asynchronous.snapshots(self).one():
            return original(self, *args, **kwargs)
    layout = layout_of(strategy)
    filepath: Any = kwargs.get("filepath", args[0] if args else None)
    if layout is None or layout.workers * layout.members == 1 or not _is_local(filepath):
        return original(self, *args, **kwargs)
    args = args[1:] if "filepath" not in kwargs else args
    kwargs.pop("filepath", None)
    given = _given(original, args, kwargs)
    if not given.get("overwrite", True) and Path(filepath).exists():
        # Keras would ask on the terminal, where a worker gets no answer. Another worker may have saved it.
        logger.warning("%s exists and overwrite=False was set: it is kept as it is.", filepath)
        return None
    # Every worker would print what it exports, and the path beside the target.
    quiet = is_export and "verbose" not in given and "verbose" in inspect.signature(original).parameters
    if quiet:
        kwargs["verbose"] = False
    with whole(Path(filepath)) as beside:
        saved = original(self, str(beside), *args, **kwargs)
    if quiet and layout.leads:
        sys.stdout.write(f"The model was exported to {filepath}.\n")
    return saved


def save_checkpoint(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """How a `ModelCheckpoint` saves: once more if another worker has just made the directory."""
    best = self.best
    try:
        return original(self, *args, **kwargs)
    except FileExistsError:
        self.best = best
        return original(self, *args, **kwargs)


def exported_variables(original: Callable[..., Any], fns: Any) -> Any:
    """The replacement of the function that lists the variables for `export`: it sorts them by creation.

    So the exports of all workers give a variable the same name. A reader may open the graph of one worker
    and the values of another, because the folder was exchanged in between; it still reads one model.
    """
    return tuple(sorted(variables, key=creation_number) for variables in original(fns))


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yields a temporary path; then moves what was written there to `target`, in one step.

    Args:
        target: a file or a directory; replaced if it exists.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_beside(target) as scratch:
        beside = scratch / target.name
        yield beside
        for written in sorted(scratch.iterdir()):
            put(written, target.parent / written.name)


def put(written: Path, target: Path) -> None:
    """Moves a file or directory to `target`, replacing what is there, in one step.

    Where the operating system cannot swap two directories, an existing target directory is deleted first.
    """
    if not written.is_dir():
        written.replace(target)
        return
    while True:
        try:
            written.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if _exchange(written, target):
            return
        with contextlib.suppress(FileNotFoundError):  # another worker has replaced it meanwhile
            safe_files.remove(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two directories in one step; returns False if the operating system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _is_local(filepath: Any) -> bool:
    return isinstance(filepath, str | os.PathLike) and "://" not in str(filepath)


def _given(save: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `save` beyond the model and the path, by name."""
    parameters = list(inspect.signature(save).parameters)[2:]
    return dict(zip(parameters, args, strict=False)) | kwargs
