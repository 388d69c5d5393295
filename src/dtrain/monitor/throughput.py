"""How fast does it train? A Keras callback that counts examples a second, epoch by epoch.

It measures the training steps alone, without validation and callbacks at the epoch's end; it writes no file.
"""

from __future__ import annotations

import time
from typing import Any

import keras


class Throughput(keras.callbacks.Callback):  # type: ignore[misc]
    """Add `examples_per_second` to every epoch's logs, for the callbacks that stand after it.

    Put it first in the list, so that CSVLogger and TensorBoard write the rate as well.

    Args:
        examples_per_epoch: how many examples all replicas together see in an epoch.
    """

    log_name = "examples_per_second"

    def __init__(self, examples_per_epoch: int) -> None:
        super().__init__()
        self.examples_per_epoch = examples_per_epoch
        self._seconds: list[float] = []
        self._start = 0.0
        self._stop: float | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the times of an earlier `fit`."""
        self._seconds.clear()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock."""
        self._start, self._stop = time.perf_counter(), None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stop the clock: what is left of the epoch is validation."""
        self._stop = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Take the epoch's time, and add its rate to the logs."""
        stop = time.perf_counter() if self._stop is None else self._stop
        self._seconds.append(stop - self._start)
        if logs is not None:
            logs[self.log_name] = self.examples_per_epoch / self._seconds[-1]

    @property
    def examples_per_second(self) -> float:
        """The rate over all epochs but the first, which also builds the graph; over the first if it is alone.

        It is 0.0 before an epoch has ended.
        """
        seconds = self._seconds[1:] or self._seconds
        return self.examples_per_epoch * len(seconds) / sum(seconds) if seconds else 0.0
