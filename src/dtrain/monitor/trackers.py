"""Callbacks that only one process of a job may make, such as those of experiment trackers.

What they log, and where, is the trackers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from dtrain import job


def on_chief(make: Callable[[], Any]) -> Any:
    """A callback that is made on the chief; on every other worker one that does nothing.

    A tracker begins a run where its callback is made: this way a job is one run. `fit` itself leaves the
    callbacks of Weights & Biases and MLflow to the chief, but what a program does before `fit` it does in
    every process.

    Args:
        make: makes the callback, after what must be done before, such as `wandb.init()`.
    """
    return make() if job.is_chief() else keras.callbacks.Callback()
