"""Base classes of dtrain's own callbacks: one without state in checkpoints, one that reports into `History`.

They define no report of their own.
"""

from __future__ import annotations

from typing import Any

import keras


class Stateless:
    """A callback whose state no checkpoint keeps. List it before Keras' class among the bases."""

    def get_state(self) -> dict[str, Any]:
        """No state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Ignores the state."""


class HistoryReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Collects one dictionary per epoch of a `fit`; `History` gets the list as an attribute.

    Args:
        attribute: the name of that attribute.

    Attributes:
        epochs: the dictionaries, by epoch.
    """

    async_safe = True  # it has no hook that is called at each batch

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self._attribute = attribute
        self.epochs: list[dict[str, Any]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the list on the model's `History`."""
        history = getattr(self.model, "history", None)
        if history is not None:
            setattr(history, self._attribute, self.epochs)

    def get_state(self) -> dict[str, Any]:
        """The epochs, for a checkpoint."""
        return {"epochs": [dict(each) for each in self.epochs]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Replaces the epochs with those of a checkpoint; later epochs are appended to them."""
        self.epochs[:] = state["epochs"]
