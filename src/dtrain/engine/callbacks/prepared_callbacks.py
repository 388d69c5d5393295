"""Prepares the callbacks of a `fit`: expands, shares between workers and times them, and asks what they need.

Only one worker writes to each path that several workers' callbacks share: the first worker with the path runs
the user's callback, and the others run one that does not write there. What a callback saves through the model
is not decided here: `saved_files.py` makes that safe.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from dtrain.base import safe_files
from dtrain.engine.loops.loop import FitSession
from dtrain.errors import ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.telemetry import events
from dtrain.upstream import keras_models
from dtrain.upstream.reach import set_methods

_BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
_ENGINE = "dtrain.engine."  # where the engine's own callbacks are
_TIMED_HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end")


# --- lists of callbacks


def listed(callbacks: Any) -> list[Any]:
    """The callbacks of `fit` as a flat list; given as a `CallbackList`, a nest, a single one or None."""
    if callbacks is None:
        return []
    given = isinstance(callbacks, keras.callbacks.CallbackList)
    flat = callbacks.callbacks if given else keras.tree.flatten(callbacks)
    return [callback.callback if isinstance(callback, TimedCallback) else callback for callback in flat]


def relisted(given: Any, callbacks: list[Any], model: Any) -> Any:
    """These callbacks, in the form in which `fit` was given its callbacks.

    Args:
        given: the argument of `fit`. A `CallbackList` is copied, because it may be given to another `fit`.
        callbacks: the callbacks that `fit` is to run.
        model: the model that `fit` trains.
    """
    if not isinstance(given, keras.callbacks.CallbackList):
        return callbacks
    copied = copy.copy(given)
    copied.callbacks = callbacks
    users = listed(given)  # Keras has prepared these: a second `set_model` would reset a `TensorBoard`
    for callback in listed(callbacks):
        if not any(callback is other for other in users):
            callback.set_params(given.params)
            callback.set_model(model)
    return copied


def expanded(callbacks: Sequence[Any], model: Any, arguments: dict[str, Any]) -> list[Any]:
    """Replaces each callback that has `dtrain_callbacks` by the callbacks that this method returns."""
    replaced: list[Any] = []
    for callback in callbacks:
        several = getattr(callback, "dtrain_callbacks", None)
        replaced += [callback] if several is None else several(model, arguments)
    return replaced


class Stateless:
    """A callback whose state no checkpoint keeps. List it before Keras' class among the bases."""

    def get_state(self) -> dict[str, Any]:
        """No state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Ignores the state."""


# --- the session of a fit


def wants_session(callbacks: Any) -> bool:
    """Whether one of the callbacks of `fit` has the method `dtrain_session`."""
    return any(hasattr(callback, "dtrain_session") for callback in listed(callbacks))


def session_of(callbacks: Sequence[Any], model: Any, arguments: dict[str, Any]) -> FitSession:
    """Makes the session of a `fit`.

    Args:
        callbacks: the callbacks of `fit`.
        model: the model that `fit` trains.
        arguments: of `fit`, by name.

    Returns:
        The session of the callback that has one; one that does nothing if none has.

    Raises:
        ConfigurationError: several callbacks have one.
    """
    wanting = [callback for callback in callbacks if hasattr(callback, "dtrain_session")]
    if len(wanting) > 1:
        raise ConfigurationError(
            f"fit was given {len(wanting)} callbacks that save and restore its state.",
            hint="Give it one BackupAndRestore; it may save by steps, epochs and seconds at once.",
        )
    session: FitSession = wanting[0].dtrain_session(model, arguments) if wanting else FitSession()
    return session


# --- callbacks that need each batch


def watches(callback: Any, kind: str) -> bool:
    """Whether a callback needs the results of every batch before the next batch starts.

    True for a callback with a batch hook of its own, except for callbacks that are known not to need it.

    Args:
        callback: a Keras callback.
        kind: "train", "test" or "predict".
    """
    if isinstance(callback, keras.callbacks.History | keras.callbacks.ProgbarLogger):
        return False
    if hasattr(callback, "dtrain_session") or not getattr(callback, "dtrain_every_batch", True):
        return False
    if _tracks_epochs(callback):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
        if keras_models.is_keras_own(callback):
            return bool(callback.save_freq != "epoch")
    elif isinstance(callback, keras.callbacks.TensorBoard) and keras_models.is_keras_own(callback):
        return bool(callback.update_freq != "epoch" or keras_models.profiles_batches(callback))
    return any(has_hook(callback, name) for name in _BATCH_HOOKS[kind] if not passes_on(callback, name))


def watched(callbacks: Any, layout: ReplicaLayout | None, *kinds: str) -> list[bool]:
    """For each kind ("train", "test", "predict"), whether a callback on any worker watches every batch.

    Every worker must call it. Without a replica layout, as on parameter servers, callbacks run here only.
    """
    seen = [any(watches(one, kind) for one in listed(callbacks)) for kind in kinds]
    return (
        seen
        if layout is None
        else [any(flags) for flags in zip(*exchange(layout, seen, what="hooks"), strict=True)]
    )


def has_hook(callback: Any, name: str) -> bool:
    """Whether a callback has a hook of its own."""
    plain = getattr(keras.callbacks.Callback, name)
    return name in vars(callback) or getattr(type(callback), name, plain) is not plain


def _tracks_epochs(callback: Any) -> bool:
    """Whether the callback is one of Weights & Biases or MLflow and is set to log epochs only."""
    kind = type(callback)
    if kind.__module__.startswith("wandb."):
        return getattr(callback, "logging_batch_wise", True) is False
    return kind.__module__.startswith("mlflow.") and getattr(callback, "log_every_epoch", False) is True


def passes_on(callback: Any, name: str) -> bool:
    """Whether the callback is a `LambdaCallback` for which the user gave no function `name`."""
    return isinstance(callback, keras.callbacks.LambdaCallback) and getattr(callback, name, None) is None


# --- the time that callbacks take


class TimedCallback:
    """Stands for a callback in a `fit`, and records the time of the hooks that the callback defines.

    Callbacks that save count as checkpoints, all others as callbacks; the seconds are kept by
    `training_clock`. Hooks for batches are not timed for `async_safe` callbacks, because Keras may call these
    in threads of its own, beside the training.

    Attributes:
        callback: the callback.

    Args:
        callback: the callback.
        before: called with the logs before the callback at the end of an epoch; None for nothing.
    """

    def __init__(self, callback: Any, before: Callable[[Any], None] | None = None) -> None:
        self.callback = callback
        self._before = before
        saves = isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)
        self._part = "checkpoint" if saves or hasattr(callback, "dtrain_session") else "callbacks"
        beside = getattr(callback, "async_safe", False)
        for name in _TIMED_HOOKS if beside else _TIMED_HOOKS + _BATCH_HOOKS["train"]:
            if has_hook(callback, name):
                setattr(self, name, functools.partial(self._call, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.callback, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None and name == "on_epoch_end":
            self._before(kwargs["logs"] if "logs" in kwargs else args[1])
        with events.part(self._part, type(self.callback).__name__):
            return getattr(self.callback, name)(*args, **kwargs)


def timed(
    callbacks: Sequence[Any],
    given: Sequence[Any],
    before: Callable[[Any], Callable[[Any], None] | None] | None = None,
) -> list[Any]:
    """The callbacks of a `fit`, of which those that are the user's are timed.

    Keras' bar and `History` are not timed, because Keras must recognise them.

    Args:
        callbacks: all callbacks, also those that a session adds.
        given: the callbacks without those of the session.
        before: returns the `before` of the `TimedCallback` of a callback; None if there is none.
    """
    untimed = keras.callbacks.History | keras.callbacks.ProgbarLogger
    users = [callback for callback in given if not type(callback).__module__.startswith(_ENGINE)]
    return [
        TimedCallback(callback, before and before(callback))
        if any(callback is other for other in users) and not isinstance(callback, untimed)
        else callback
        for callback in callbacks
    ]


# --- paths that workers share


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
    """
    callbacks = list(callbacks)
    if layout.workers == 1:
        return callbacks
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
        _follower(callback) if path in followed else callback
        for callback, path in zip(callbacks, paths, strict=True)
    ]


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


def _follower(callback: Any) -> Any:
    """What this worker runs in place of a callback whose files another worker writes."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return RestoreOnly(callback)
    if keras_models.is_keras_own(callback):
        return keras.callbacks.Callback()
    # A user's subclass may do more than write, so it still runs, but its files are discarded.
    quiet = copy.copy(callback)
    if isinstance(callback, keras.callbacks.CSVLogger):
        quiet.filename = os.devnull
    else:
        scratch = tempfile.TemporaryDirectory(prefix="dtrain-follower-")
        quiet.log_dir = scratch.name
        quiet._dtrain_scratch = scratch
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
