"""Times the hooks of the user's callbacks during a `fit`.

Callbacks that save count as checkpoints, all others as callbacks. The seconds are not kept here, but in
`time_breakdown`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from dtrain import events

_HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
)
# Not timed for `async_safe` callbacks: Keras may call these hooks in its own threads, beside the training.
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class TimedHook:
    """Replaces a callback's hook by one that records the time it takes.

    A deep copy or a pickle of the callback has the plain hook.

    Args:
        callback: the callback.
        name: the name of the hook.
    """

    def __init__(self, callback: Any, name: str) -> None:
        self._callback, self._name = callback, name
        self._own = vars(callback).get(name)
        self._plain = getattr(callback, name)
        self._part, self._whose = _part(callback), type(callback).__name__
        setattr(callback, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the hook, and records its time."""
        with events.part(self._part, self._whose):
            return self._plain(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._callback, self._name)) if self._own is None else (_same, (self._own,))

    def undo(self) -> None:
        """Restores the callback's own hook, unless other code has replaced the timed hook meanwhile."""
        if vars(self._callback).get(self._name) is not self:
            return
        if self._own is None:
            delattr(self._callback, self._name)
        else:
            setattr(self._callback, self._name, self._own)


@contextlib.contextmanager
def timed(callbacks: Sequence[Any]) -> Iterator[None]:
    """A context in which the times of these callbacks' hooks are recorded by the callbacks' class names."""
    hooks: list[TimedHook] = []
    try:
        for callback in callbacks:
            hooks += [TimedHook(callback, name) for name in _hooks_of(callback)]
        yield
    finally:
        for hook in reversed(hooks):
            hook.undo()


def _same(value: Any) -> Any:
    return value


def _hooks_of(callback: Any) -> list[str]:
    names = _HOOKS if getattr(callback, "async_safe", False) else _HOOKS + _BATCH_HOOKS
    return [name for name in names if name in vars(callback) or _overrides(type(callback), name)]


def _overrides(kind: type, name: str) -> bool:
    plain = getattr(keras.callbacks.Callback, name)
    return getattr(kind, name, plain) is not plain


def _part(callback: Any) -> str:
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore)
    return "checkpoint" if saves or hasattr(callback, "dtrain_session") else "callbacks"
