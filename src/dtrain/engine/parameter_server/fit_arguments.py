"""Prepares the arguments of `fit`, `evaluate` and `predict` under parameter servers, before Keras uses them.

It makes datasets from functions, and adds the staleness report. It runs no step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.loops.loop import current_loop
from dtrain.errors import DataError
from dtrain.interfaces.replica_layout import ServerLayout


class StalenessReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds the staleness of each epoch to the epoch's logs, so that `History` and other callbacks record it.

    A step's staleness is the number of updates that the servers applied between the step's read of the
    weights and its own update. `staleness` is the mean over the epoch's steps, `staleness_max` the maximum.
    The updates are those of other workers; with `ParameterServerStrategy(overlap=True)`, at most one is the
    worker's own.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds both numbers to `logs` in place: Keras passes the same dictionary to all callbacks."""
        totals = current_loop().blocks
        if logs is not None:
            logs["staleness"] = totals.mean_staleness
            logs["staleness_max"] = totals.most
        logger.info(
            "Epoch %d: %d updates; staleness %.2f on average, %d at most.",
            epoch + 1,
            totals.updates,
            totals.mean_staleness,
            totals.most,
        )


def prepare_fit(layout: ServerLayout, arguments: dict[str, Any], callbacks: list[Any]) -> list[Any]:
    """Changes the data in the arguments of `fit` in place.

    Returns:
        The callbacks, with one that reports the staleness.

    Raises:
        DataError: a function given as data returned no `tf.data.Dataset`.
    """
    arguments["x"] = _dataset(arguments["x"], "x")
    arguments["validation_data"] = _dataset(arguments["validation_data"], "validation_data")
    reported = any(isinstance(callback, StalenessReport) for callback in callbacks)
    if (layout.workers > 1 or layout.overlap) and not reported:
        callbacks = [StalenessReport(), *callbacks]
    return callbacks


def prepare_without_training(arguments: dict[str, Any]) -> None:
    """Changes the data in the arguments of `evaluate` or `predict` in place; raises as `prepare_fit` does."""
    arguments["x"] = _dataset(arguments["x"], "x")


def _dataset(data: Any, name: str) -> Any:
    """Returns the dataset that a function `InputContext -> Dataset` makes; other data unchanged.

    Raises:
        DataError: the function returned something else than a `tf.data.Dataset`.
    """
    if not callable(data) or isinstance(data, tf.data.Dataset | keras.utils.PyDataset):
        return data
    made = data(tf.distribute.InputContext())
    if not isinstance(made, tf.data.Dataset):
        raise DataError(
            f"{name} is a function, and it returned a {type(made).__name__}, not a tf.data.Dataset.",
            hint="return batches, such as tf.data.Dataset.from_tensor_slices(...).batch(64)",
        )
    return made
