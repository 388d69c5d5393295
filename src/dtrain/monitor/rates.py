"""How fast does it train? Each epoch's speed in its logs, and the speed of a run.

It counts the training steps alone, without validation and callbacks; it writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from dtrain.training_rate import NAME, mark, training_seconds


class RateLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds `examples_per_second`, of the whole job, to the logs of every epoch, for the callbacks after it.

    It adds nothing where examples cannot be counted. Put it first in the list, so that CSVLogger and
    TensorBoard write it as well.
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
        rate = mark().since(self._begun).examples_per_second
        if logs is not None and rate:
            logs[NAME] = rate


def epoch_rate(record: Mapping[str, Any]) -> float | None:
    """Examples a second of an epoch of a `time_report`; None where they were not counted."""
    seconds = training_seconds(record["parts"])
    return None if record["examples"] is None or seconds <= 0 else record["examples"] / seconds


def training_rate(epochs: Sequence[Mapping[str, Any]]) -> float:
    """Examples a second over all epochs of a `time_report` but the first, or over that if it is alone.

    The first also starts the input and finds out how many steps to make at a time. NaN where nothing was
    counted.
    """
    counted = [each for each in epochs if each["examples"] is not None]
    counted = counted[1:] or counted
    seconds = sum(training_seconds(each["parts"]) for each in counted)
    return sum(each["examples"] for each in counted) / seconds if seconds > 0 else float("nan")
