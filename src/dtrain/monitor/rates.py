"""How fast does it train? Each epoch's speed in its logs, and the speed of a run.

What counts is `dtrain.training_rate`'s to say; it writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from dtrain.training_rate import NAME, TRAINING, mark, of_epoch, of_run


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


def training_rate(epochs: Sequence[Mapping[str, Any]]) -> float:
    """Examples a second of a `time_report`, as `of_run` counts them; NaN where they were not counted.

    Of a run in which something was traced for every step, it is the rate with that.
    """
    counted = [each for each in epochs if each["examples"] is not None]
    rate = of_run(map(of_epoch, counted)).examples_per_second
    if rate is not None:
        return rate
    seconds = sum(each["parts"][part] for each in counted for part in (*TRAINING, "start"))
    return sum(each["examples"] for each in counted) / seconds if seconds > 0 else float("nan")
