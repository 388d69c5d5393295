"""A Keras callback that reports each epoch to Ray Train, with a checkpoint of the model if asked for.

It is for results and for choosing among runs. To resume training exactly, use `dtrain.BackupAndRestore`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import ray.train

from dtrain.errors import ConfigurationError
from dtrain.process_group import ranks


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls `ray.train.report` at the end of each epoch, in every worker, with the epoch and its logs.

    Args:
        model_every: the number of epochs after which the first worker also reports a checkpoint with the
            model, as `model.keras`; 0 for never.

    Raises:
        ConfigurationError: the number is negative.

    Example:
        ```python
        report = dtrain.ray.ReportCallback(model_every=5)
        # In a worker: model.fit(x, y, epochs=20, callbacks=[report])
        ```
    """

    def __init__(self, model_every: int = 0) -> None:
        super().__init__()
        if model_every < 0:
            raise ConfigurationError(f"model_every is {model_every}.", hint="0 reports no model.")
        self.model_every = model_every

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the epoch, counted from 0."""
        metrics = {"epoch": epoch, **{name: float(value) for name, value in (logs or {}).items()}}
        if not self.model_every or (epoch + 1) % self.model_every:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ranks.is_chief():
                self.model.save(Path(folder) / "model.keras")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)
