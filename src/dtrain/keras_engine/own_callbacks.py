"""What dtrain's own callbacks share: what a checkpoint keeps of them, and how `History` gets a report."""

from __future__ import annotations

from typing import Any

import keras


class Stateless:
    """A callback of which a checkpoint keeps nothing; name it before Keras' class among the bases."""

    def get_state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes nothing."""


class HistoryReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes a dictionary an epoch of one `fit`; `History` gets their list as an attribute.

    Args:
        attribute: its name.

    Attributes:
        epochs: the dictionaries.
    """

    async_safe = True  # it asks for no batch

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self._attribute = attribute
        self.epochs: list[dict[str, Any]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the list into the history."""
        history = getattr(self.model, "history", None)
        if history is not None:
            setattr(history, self._attribute, self.epochs)

    def get_state(self) -> dict[str, Any]:
        """What goes on in another process: the epochs."""
        return {"epochs": [dict(each) for each in self.epochs]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Puts the epochs of another process before those of this one."""
        self.epochs[:] = state["epochs"]
