"""Times the user's callbacks of a `fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from dtrain.engine.callbacks.callback_hooks import BATCH_HOOKS, has_hook
from dtrain.telemetry import events

_ENGINE = "dtrain.engine."  # where the engine's own callbacks are


_TIMED_HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end")


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
        for name in _TIMED_HOOKS if beside else _TIMED_HOOKS + BATCH_HOOKS["train"]:
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
