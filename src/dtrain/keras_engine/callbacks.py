"""Lets one worker for each path write what Keras' callbacks write.

The callbacks stay Keras' own; where several workers share a path, all but the first of them keep silent.
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.upstream.keras import is_keras_own


class RestoreOnly(keras.callbacks.Callback):  # type: ignore[misc]
    """A follower's `BackupAndRestore`: it restores the backup that the leader writes."""

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores, as the leader does."""
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


def shared_between_workers(callbacks: Sequence[Any], layout: ReplicaLayout) -> list[Any]:
    """The callbacks that this worker should run; all workers must call it.

    Args:
        callbacks: what the user gave to `fit`.
        layout: the strategy's.
    """
    callbacks = list(callbacks)
    if layout.workers == 1:
        return callbacks
    if layout.worker > 0:
        callbacks = [keras.callbacks.Callback() if is_tracker(each) else each for each in callbacks]
    paths = [_path(callback) for callback in callbacks]
    followed = _followed({path for path in paths if path is not None}, layout)
    return [
        _follower(callback) if path in followed else callback
        for callback, path in zip(callbacks, paths, strict=True)
    ]


def is_tracker(callback: Any) -> bool:
    """Whether a callback tells Weights & Biases or MLflow of a run, which is one run for all workers."""
    packages = {kind.__module__.partition(".")[0] for kind in type(callback).__mro__}
    return not packages.isdisjoint({"wandb", "mlflow"})


def _path(callback: Any) -> str | None:
    """The path that a callback writes to; None if it writes nothing, or saves through the model."""
    if hasattr(callback, "dtrain_session"):  # its session knows of all workers
        return None
    if isinstance(callback, keras.callbacks.CSVLogger):
        return os.path.abspath(callback.filename)  # noqa: PTH100
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return os.path.abspath(callback.backup_dir)  # noqa: PTH100
    if isinstance(callback, keras.callbacks.TensorBoard):
        return os.path.abspath(str(callback.log_dir))  # noqa: PTH100
    return None


def _follower(callback: Any) -> Any:
    """The callback that replaces one whose files another worker writes."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return RestoreOnly(callback)
    if is_keras_own(callback):
        return keras.callbacks.Callback()
    # A class of the user's own may do more than write: it goes on, its files go nowhere.
    quiet = copy.copy(callback)
    if isinstance(callback, keras.callbacks.CSVLogger):
        quiet.filename = os.devnull
    else:
        scratch = tempfile.TemporaryDirectory(prefix="dtrain-follower-")
        quiet.log_dir = scratch.name
        quiet._dtrain_scratch = scratch
    return quiet


def _followed(paths: set[str], layout: ReplicaLayout) -> set[str]:
    """Those of this worker's paths that an earlier worker writes to, on a disk that both see."""
    everyone = exchange(layout, sorted(paths))
    leader = {path: next(w for w, theirs in enumerate(everyone) if path in theirs) for path in paths}
    token = secrets.token_hex(8)
    marks = {path: _leave(path, token) for path in paths if leader[path] == layout.worker}
    all_marks = exchange(layout, marks)
    followed = {
        path for path in paths if leader[path] != layout.worker and _seen(all_marks[leader[path]].get(path))
    }
    exchange(layout, None)
    for mark in marks.values():
        if mark:
            with contextlib.suppress(OSError):
                os.remove(mark)  # noqa: PTH107
    return followed


def _leave(path: str, mark: str) -> str | None:
    """Creates a file beside the path, by which other workers recognise a shared disk."""
    if "://" in path:
        return ""
    beside = Path(path).parent / f".dtrain-{mark}"
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
    except OSError:
        return None
    return str(beside)


def _seen(mark: str | None) -> bool:
    return mark == "" or (mark is not None and Path(mark).exists())
