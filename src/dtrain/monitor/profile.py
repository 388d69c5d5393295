"""Records some steps of a `fit` with TensorFlow's profiler, for TensorBoard's profile page.

Unlike Keras' `TensorBoard(profile_batch=...)` it leaves the calls of the train function as long as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from dtrain import events, job
from dtrain.keras_engine.own_callbacks import Stateless
from dtrain.log import logger
from dtrain.step_counts import counter


class Profile(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Profiles, on the first worker, the calls that make these steps.

    Args:
        directory: of TensorBoard's files; the profile goes to `plugins/profile` below it.
        first: the step to begin with, counted from 1.
        last: the step to end with.
    """

    dtrain_every_batch = False

    def __init__(self, directory: Path, first: int, last: int) -> None:
        super().__init__()
        self._directory = directory
        self._first, self._last = first, last
        self._before = 0
        self._state = "waits" if job.is_chief() else "done"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Steps count from here."""
        self._before = counter.trained.steps
        events.listen(self)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins, if the next call makes the first of the steps or comes after it."""
        if self._state != "waits" or counter.trained.steps - self._before + 1 < self._first:
            return
        self._state = "done"
        try:
            tf.profiler.experimental.start(str(self._directory))
        except tf.errors.AlreadyExistsError:  # the user's own
            logger.warning("TensorFlow's profiler is at work already: steps are not profiled by the Monitor.")
            return
        self._state = "runs"

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends, if the last of the steps was made."""
        if self._state == "runs" and counter.trained.steps - self._before >= self._last:
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends, if training was shorter."""
        if self._state == "runs":
            self._stop()

    def _handle_fit_ends(self, _: events.FitEnds) -> None:
        self.on_train_end()

    def _stop(self) -> None:
        self._state = "done"
        tf.profiler.experimental.stop()
