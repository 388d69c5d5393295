"""The callbacks of a `fit` as a list, and the session of checkpoints that one of them asks for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import keras

from dtrain.engine.callbacks.timed_callbacks import TimedCallback
from dtrain.engine.loops.fit_session import FitSession
from dtrain.errors import ConfigurationError


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
