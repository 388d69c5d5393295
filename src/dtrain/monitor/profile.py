"""Records some steps of a `fit` with TensorFlow's profiler, for TensorBoard's profile page.

Unlike Keras' `TensorBoard(profile_batch=...)`, it does not reduce the number of steps that one call of the
train function makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.process_group import ranks
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import clock


class Profile(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Profiles, on the chief, the calls of the train function that make the steps `first` to `last`.

    Args:
        directory: TensorBoard's directory; the profile goes to `plugins/profile` below it.
        first: the first step to profile, counted from 1.
        last: the last step to profile.
    """

    dtrain_every_batch = False

    def __init__(self, directory: Path, first: int, last: int) -> None:
        super().__init__()
        self._directory = directory
        self._first, self._last = first, last
        self._before = 0
        self._state = "waits" if ranks.is_chief() else "done"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the number of steps; `first` and `last` count from here."""
        self._before = clock.trained.steps
        events.listen(self)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the profiler, if the next call begins at step `first` or later."""
        if self._state != "waits" or clock.trained.steps - self._before + 1 < self._first:
            return
        self._state = "done"
        try:
            tf.profiler.experimental.start(str(self._directory))
        except tf.errors.AlreadyExistsError:  # the user started the profiler
            logger.warning("TensorFlow's profiler is already running: the Monitor does not profile steps.")
            return
        self._state = "runs"

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the profiler, if step `last` is done."""
        if self._state == "runs" and clock.trained.steps - self._before >= self._last:
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the profiler, if training ended before step `last`."""
        if self._state == "runs":
            self._stop()

    def _handle_fit_ends(self, _: events.FitEnds) -> None:
        self.on_train_end()

    def _stop(self) -> None:
        self._state = "done"
        tf.profiler.experimental.stop()
