"""Makes callbacks that only one process of a job may make, such as those of experiment trackers.

It does not decide what a tracker logs, or where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from dtrain.process_group import ranks


def on_chief(make: Callable[[], Any]) -> Any:
    """Make a callback on the chief; every other worker gets a callback that does nothing.

    A tracker begins a run in each process that sets it up, so without this function a job becomes several
    runs. `fit` already calls the callbacks of Weights & Biases and MLflow on the chief only, but the code
    before `fit` runs in every process.

    Args:
        make: makes the callback, after any set-up that it needs, such as `wandb.init()`.

    Returns:
        The result of `make` on the chief; on other workers a `keras.callbacks.Callback`.

    Example:
        ```python
        tracker = dtrain.monitor.on_chief(lambda: keras.callbacks.CSVLogger("log.csv"))
        ```
    """
    return make() if ranks.is_chief() else keras.callbacks.Callback()
