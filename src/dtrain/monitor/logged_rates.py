"""Adds the training rate of each epoch to the epoch's logs.

`dtrain.telemetry.training_clock` decides which steps count. This module writes no file; other callbacks
write the logs.
"""

from __future__ import annotations

from typing import Any

import keras

from dtrain.telemetry.training_clock import clock
from dtrain.telemetry.training_rate import NAME


class RateLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds `examples_per_second`, of the whole job, to the logs of every epoch, for the callbacks after it.

    Steps in which a function was traced count only if an epoch has no others. Nothing is added if examples
    cannot be counted. Put this callback first in the list, so that CSVLogger and TensorBoard write the rate.
    """

    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._begun = clock.mark()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the time and the counts at the start of the epoch."""
        self._begun = clock.mark()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's rate to `logs`."""
        figures = clock.mark().since(self._begun)
        figures = figures if figures.steps > 0 else clock.mark().since(self._begun, start=True)
        rate = figures.examples_per_second
        if logs is not None and rate:
            logs[NAME] = rate
