"""Lets one worker write to each path that several workers' callbacks share.

The first worker with the path runs the user's callback, and the others run one that does not write there.
What a callback saves through the model is not decided here: `saved_files.py` makes that safe.
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

from dtrain.base import safe_files
from dtrain.errors import ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_models
from dtrain.upstream.reach import set_methods


class RestoreOnly(keras.callbacks.Callback):  # type: ignore[misc]
    """Takes the place of a `BackupAndRestore` whose backup another worker writes: it only restores it."""

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the backup, as the worker that writes it does."""
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


def shared_between_workers(callbacks: Sequence[Any], layout: ReplicaLayout) -> list[Any]:
    """The callbacks that this worker runs. All workers must call it.

    Args:
        callbacks: the user's.
        layout: the strategy's.

    Raises:
        ConfigurationError: Keras' `BackupAndRestore` would save divided weights.
    """
    callbacks = list(callbacks)
    if layout.member > 0:
        return [_member(callback, layout) for callback in callbacks]
    if layout.workers == 1:
        return callbacks
    for callback in callbacks:
        of_keras = isinstance(callback, keras.callbacks.BackupAndRestore) and _path(callback) is not None
        if layout.divided and of_keras:
            raise ConfigurationError(
                "Keras' BackupAndRestore saves on one worker, and the model's weights are divided over the "
                "workers.",
                hint="use dtrain.BackupAndRestore, in which each worker saves what it holds",
            )
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            set_methods(callback)
    if layout.worker > 0:
        callbacks = [
            keras.callbacks.Callback() if is_tracker(callback) else callback for callback in callbacks
        ]
    paths = [_path(callback) for callback in callbacks]
    followed = _followed({path for path in paths if path is not None}, layout)
    return [
        _follower(callback, layout) if path in followed else callback
        for callback, path in zip(callbacks, paths, strict=True)
    ]


def _member(callback: Any, layout: ReplicaLayout) -> Any:
    """What a worker of a job with a quorum runs in place of a callback, unless it is the first worker.

    All run on one machine, so the first worker writes all files, and saves and restores.
    """
    saves = hasattr(callback, "dtrain_session") or isinstance(callback, keras.callbacks.BackupAndRestore)
    if saves or is_tracker(callback):
        return keras.callbacks.Callback()
    if isinstance(callback, keras.callbacks.ModelCheckpoint) or _path(callback) is not None:
        return _follower(callback, layout)
    return callback


def is_tracker(callback: Any) -> bool:
    """Whether a callback reports to Weights & Biases or MLflow.

    All workers are one run there, so only the first worker reports it.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(callback).__mro__}
    return not packages.isdisjoint({"wandb", "mlflow"})


def _path(callback: Any) -> str | None:
    """The path that a callback writes to; None if it writes nothing, or saves through the model."""
    if hasattr(callback, "dtrain_session"):  # its session coordinates the workers
        return None
    if isinstance(callback, keras.callbacks.CSVLogger):
        return os.path.abspath(callback.filename)  # noqa: PTH100
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return os.path.abspath(callback.backup_dir)  # noqa: PTH100
    if isinstance(callback, keras.callbacks.TensorBoard):
        return os.path.abspath(str(callback.log_dir))  # noqa: PTH100
    return None


def _follower(callback: Any, layout: ReplicaLayout) -> Any:
    """What this worker runs in place of a callback whose files another worker writes.

    Divided weights are read by all workers together, so a callback that reads them runs on all.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return RestoreOnly(callback)
    if keras_models.is_keras_own(callback) and not layout.divided:
        return keras.callbacks.Callback()
    # A user's subclass may do more than write, so it still runs, but its files are discarded.
    quiet = copy.copy(callback)
    if isinstance(callback, keras.callbacks.CSVLogger):
        quiet.filename = os.devnull
    else:
        scratch = tempfile.TemporaryDirectory(prefix="dtrain-follower-")
        quiet._dtrain_scratch = scratch
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            quiet.filepath = str(Path(scratch.name) / Path(callback.filepath).name)
        else:
            quiet.log_dir = scratch.name
    return quiet


def _followed(paths: set[str], layout: ReplicaLayout) -> set[str]:
    """The paths of this worker that an earlier worker writes to, on a disk that both share."""
    everyone = exchange(layout, sorted(paths), what="paths")
    leader = {path: next(w for w, theirs in enumerate(everyone) if path in theirs) for path in paths}
    marks = {path: _leave(path) for path in paths if leader[path] == layout.worker}
    all_marks = exchange(layout, marks, what="marks")
    followed = {
        path for path in paths if leader[path] != layout.worker and _seen(all_marks[leader[path]].get(path))
    }
    # A barrier: the files must stay until every worker has looked for them.
    exchange(layout, None)
    for mark in marks.values():
        if mark:
            with contextlib.suppress(OSError):
                safe_files.remove(mark)
    return followed


def _leave(path: str) -> str | None:
    """Creates a file beside `path`, by which other workers recognise a shared disk.

    Returns:
        The file's path; "" for a URL, which counts as shared; None if the file cannot be created.
    """
    if "://" in path:
        return ""
    beside = Path(path).parent / f".dtrain-{secrets.token_hex(8)}"  # several paths may have one folder
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        os.close(safe_files.create(beside))
    except OSError:
        return None
    return str(beside)


def _seen(mark: str | None) -> bool:
    return mark == "" or (mark is not None and Path(mark).exists())
