"""Captures and restores the states of callbacks as plain data, such as patience, best values and History.

A callback with `get_state()` and `set_state(state)` defines its state itself. For any other callback, the
state is every attribute that holds plain data and has changed since `fit` began. It writes no checkpoint.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from dtrain.base import safe_files
from dtrain.base.counts import is_count
from dtrain.base.log import logger
from dtrain.data.unpickling import dump_arrays, load_arrays
from dtrain.errors import ConfigurationError, UnsafeFileError

_SKIPPED = ("model", "_model", "params", "validation_data")
_COMPARISONS = {"less": keras.ops.less, "greater": keras.ops.greater}
_PLAIN = (bool, int, float, str, bytes, type(None))


class CallbackStates:
    """The states of the callbacks of one `fit`.

    Args:
        callbacks: the callbacks in the order in which `fit` calls them, before `fit` has called any.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        # Attributes that have not changed are not saved: a restarted program sets them itself.
        self._baseline = [_attributes(callback) for callback in self._callbacks]

    def capture(self, history: Any, epoch: int | None, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the current states as plain data.

        Args:
            history: the `History` of this `fit`, which may not be among the callbacks.
            epoch: the epoch that has just ended, which `history` may not have recorded yet; None within an
                epoch.
            logs: the logs of that epoch.

        Raises:
            ConfigurationError: a callback's `get_state()` returned something else than plain data.
        """
        states = []
        for callback, baseline in zip(self._callbacks, self._baseline, strict=True):
            if isinstance(callback, keras.callbacks.History):
                states.append(_history(callback, epoch, logs))
            else:
                states.append(_state(callback, baseline))
        return {
            "kinds": [type(callback).__name__ for callback in self._callbacks],
            "states": states,
            "history": _history(history, epoch, logs),
        }

    def restore(self, saved: dict[str, Any], history: Any, *, only_history: bool) -> None:
        """Restores the states of the callbacks and of the model's own `History`.

        Args:
            saved: what `capture` returned.
            history: as for `capture`.
            only_history: whether to restore `History` callbacks only.
        """
        # States are matched by class, in order: a restarted program may have one more callback.
        states: dict[str, list[dict[str, Any]]] = {}
        for kind, state in zip(saved["kinds"], saved["states"], strict=True):
            states.setdefault(kind, []).append(state)
        for callback in self._callbacks:
            if only_history and not isinstance(callback, keras.callbacks.History):
                continue
            remaining = states.get(type(callback).__name__)
            if remaining:
                _restore(callback, remaining.pop(0))
            else:
                logger.info(
                    "The checkpoint holds no state of the callback %s: it starts from its initial state.",
                    type(callback).__name__,
                )
        if history is not None:
            vars(history).update(copy.deepcopy(saved["history"]))

    def prepare_logs(self, saved: dict[str, Any]) -> None:
        """Truncates CSV logs to their size at the checkpoint, and makes `CSVLogger` append to them.

        Call it before any `on_train_begin`. Nothing changes if the number of CSV logs differs.
        """
        logs = [callback for callback in self._callbacks if isinstance(callback, keras.callbacks.CSVLogger)]
        lengths = [state["length"] for state in saved["states"] if "length" in state]
        if len(logs) == len(lengths):
            for callback, length in zip(logs, lengths, strict=True):
                _cut(callback, length)


def is_saved(saved: dict[str, Any]) -> bool:
    """Whether a value has the form of those that `CallbackStates.capture` returns."""
    kinds, states, history = (saved.get(name) for name in ("kinds", "states", "history"))
    return (
        isinstance(kinds, list)
        and isinstance(states, list)
        and len(kinds) == len(states)
        and all(isinstance(kind, str) for kind in kinds)
        and all(map(_is_state, states))
        and isinstance(history, dict)
        and isinstance(history.get("epoch"), list)
        and isinstance(history.get("history"), dict)
    )


def _is_state(state: Any) -> bool:
    if not (isinstance(state, dict) and is_count(state.get("length", 0))):
        return False
    attributes = state.get("attributes", {})
    if not isinstance(attributes, dict) or state.get("comparison", "less") not in _COMPARISONS:
        return False
    names = all(isinstance(name, str) and not name.startswith("__") for name in attributes)
    return names and not {*attributes} & {*_SKIPPED} and all(map(_loads, attributes.values()))


def _loads(value: Any) -> bool:
    try:
        load_arrays(value)
    except Exception:  # unpickling raises anything for bytes that were changed
        return False
    return True


def is_plain(value: Any) -> bool:
    """Whether a value is plain data: numbers, text, bytes, None, arrays, or built-in containers of them."""
    # Only of these types themselves: an object of a subclass, as an enumeration, is pickled with its class.
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biufSU"
    if type(value) in _PLAIN:
        return True
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple, set, frozenset) and all(is_plain(item) for item in value)


def _attributes(callback: Any) -> dict[str, bytes]:
    """The attributes of a callback that hold plain data, pickled, so that they can be compared."""
    return {
        name: dump_arrays(value)
        for name, value in vars(callback).items()
        if name not in _SKIPPED and is_plain(value)
    }


def _has_own(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


def _state(callback: Any, baseline: dict[str, bytes]) -> dict[str, Any]:
    if _has_own(callback):
        own = callback.get_state()
        if not is_plain(own):
            raise ConfigurationError(
                f"{type(callback).__name__}.get_state() gave a {type(own).__name__}, which cannot be saved.",
                hint="Only numbers, text, NumPy arrays, and lists, tuples, sets and dictionaries of them "
                "can be saved.",
            )
        return {"own": own}
    attributes = {name: value for name, value in _attributes(callback).items() if baseline.get(name) != value}
    state: dict[str, Any] = {"attributes": attributes}
    # `monitor_op` is a function, so no plain data: Keras' callbacks choose it when they first compare.
    for name, op in _COMPARISONS.items():
        if getattr(callback, "monitor_op", None) is op:
            state["comparison"] = name
    if isinstance(callback, keras.callbacks.CSVLogger):
        # The file's size is the state; the callback finds out again whether a header is needed.
        attributes.pop("append_header", None)
        path = Path(callback.filename)
        state["length"] = path.stat().st_size if path.is_file() else 0
    return state


def _restore(callback: Any, state: dict[str, Any]) -> None:
    if isinstance(callback, keras.callbacks.History):
        vars(callback).update(copy.deepcopy(state))
        return
    if "own" in state:
        callback.set_state(state["own"])
        return
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, load_arrays(value))
    if "comparison" in state:
        callback.monitor_op = _COMPARISONS[state["comparison"]]


def _history(history: Any, epoch: int | None, logs: dict[str, Any]) -> dict[str, Any]:
    """The state of a `History` after the epoch that has just ended."""
    epochs = list(getattr(history, "epoch", []))
    metrics = {name: list(values) for name, values in getattr(history, "history", {}).items()}
    if epoch is not None and epoch not in epochs:
        epochs.append(epoch)
        for name, value in logs.items():
            metrics.setdefault(name, []).append(value)
    metrics = {name: [v if is_plain(v) else float(v) for v in values] for name, values in metrics.items()}
    return {"epoch": epochs, "history": metrics}


def _cut(callback: Any, length: int) -> None:
    path = Path(callback.filename)
    if not path.is_file():
        return
    if path.stat().st_size > length:
        try:
            descriptor = safe_files.open_regular(path, os.O_WRONLY)
        except UnsafeFileError as error:
            raise ConfigurationError(
                f"The log of CSVLogger cannot be cut to its length at the checkpoint: {error.message}",
                hint="Give CSVLogger the path of a file of its own.",
            ) from error
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(length)
    callback.append = True
