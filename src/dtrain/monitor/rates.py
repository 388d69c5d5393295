"""How fast does it train? Each epoch's speed in its logs.

What counts is `dtrain.training_rate`'s to say; it writes no file.
"""

from __future__ import annotations

from typing import Any

import keras

from dtrain.training_rate import NAME, mark


class RateLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds `examples_per_second`, of the whole job, to the logs of every epoch, for the callbacks after it.

    Steps for which something was traced count where an epoch has no others. It adds nothing where examples
    cannot be counted. Put it first in the list, so that CSVLogger and TensorBoard write it as well.
    """

    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._begun = mark()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the epoch begins."""
        self._begun = mark()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's rate."""
        found = mark().since(self._begun)
        found = found if found.steps > 0 else mark().since(self._begun, start=True)
        rate = found.examples_per_second
        if logs is not None and rate:
            logs[NAME] = rate
