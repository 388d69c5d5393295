"""Callbacks that begin anew in another process: a checkpoint keeps nothing of them."""

from __future__ import annotations

from typing import Any


class Stateless:
    """A callback of which a checkpoint keeps nothing; name it before Keras' class among the bases."""

    def get_state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes nothing."""
