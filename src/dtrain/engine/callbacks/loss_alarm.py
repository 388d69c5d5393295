"""Warns of losses that are not finite, or that jump, or ends the `fit`.

`LossAlarm` reads the logs that Keras gives its callbacks, and requests no others.
"""

from __future__ import annotations

import collections
import math
import statistics
import threading
import warnings
from typing import Any, Literal

import keras
import numpy as np

from dtrain.base.log import logger
from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.engine.step.steps import step_is_stock
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import managed
from dtrain.telemetry import events

OnNan = Literal["warn", "stop"]


_LOSSES_KEPT = 30  # the most recent losses whose median is the usual loss


_LOSSES_NEEDED = 8  # the fewest losses that give a usual loss


# A loss is a jump if it exceeds the usual loss by more than
_DEVIATIONS = 10.0  # standard deviations, estimated from the median absolute deviation,


_TIMES_USUAL = 1.0  # and by more than this times the usual loss.


_MOST_JUMP_LINES = 3  # warnings about jumps in one `fit`


class LossAlarm(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Warns once a `fit` when the loss is NaN or infinite, and at most three times a `fit` when it jumps.

    The mean loss of the steps since the last call of the train function is a jump if it is more than twice
    the median of the losses before it, and further from this median than they usually vary. Under parameter
    servers jumps are not detected. Every process warns of NaN.

    Args:
        on_nan: "warn"; or "stop" to also end training, on all workers after the same step.
        reports: whether this process warns of jumps, and emits `events.Alarm`.

    Raises:
        ConfigurationError: `on_nan` is another value.
    """

    dtrain_every_batch = False

    def __init__(self, on_nan: OnNan = "warn", *, reports: bool = True) -> None:
        super().__init__()
        if on_nan not in ("warn", "stop"):
            raise ConfigurationError(f"on_nan is {on_nan!r}.", hint='"warn" or "stop"')
        self._on_nan = on_nan
        self._reports = reports
        # Stopping must happen at the same step on all workers. A warning may also come from the thread in
        # which Keras runs asynchronous callbacks.
        self.async_safe = on_nan == "warn"
        self._lock = threading.Lock()
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOSSES_KEPT)
        self._said_nan = False
        self._lines = 0
        self._jumps = False
        self._epoch = 0
        self._seen = (0, 0.0)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets the losses and the warnings of an earlier `fit`."""
        self._losses.clear()
        self._said_nan, self._lines, self._jumps = False, 0, False
        self._means = step_is_stock(self.model, "train_step")
        # Under parameter servers the logs are those of completed steps, which are not the steps of the call.
        self._jumps_seen = managed(self.model.distribute_strategy).asynchronous is None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts anew, because Keras' logs are means over the steps of one epoch."""
        self._epoch, self._seen = epoch, (0, 0.0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the loss in the logs."""
        self._check(int(batch + 1), (logs or {}).get("loss"))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the epoch's loss."""
        self._check(None, (logs or {}).get("loss"))

    def _check(self, steps: int | None, loss: Any) -> None:
        if loss is None or np.size(loss) != 1:
            return
        value = float(np.asarray(loss).reshape(()))
        with self._lock:
            if not math.isfinite(value):
                self._nan(value, steps)
            elif steps is not None and steps > self._seen[0] and self._jumps_seen:
                self._new(steps, value)

    def _new(self, steps: int, loss: float) -> None:
        """Checks the mean loss of the steps since the last call of the train function.

        It is computed from two logs, because Keras logs the mean over the epoch's steps so far. The logs of a
        custom `train_step` are taken as they are.
        """
        before, old = self._seen
        self._seen = (steps, loss)
        recent = (loss * steps - old * before) / (steps - before) if self._means else loss
        usual = statistics.median(self._losses) if len(self._losses) >= _LOSSES_NEEDED else None
        if usual is not None and self._is_jump(recent, usual):
            if not self._jumps:
                self._jump(before + 1, steps, recent, usual)
            self._jumps = True
            return
        self._jumps = False
        self._losses.append(recent)

    def _is_jump(self, recent: float, usual: float) -> bool:
        spread = 1.4826 * statistics.median(abs(loss - usual) for loss in self._losses)
        return recent - usual > max(_DEVIATIONS * spread, _TIMES_USUAL * abs(usual))

    def _jump(self, first: int, last: int, recent: float, usual: float) -> None:
        where = f"step {last}" if first >= last else f"steps {first} to {last}"
        line = (
            f"The loss jumped to {recent:.4g} in {where} of epoch {self._epoch + 1}; before it was "
            f"{usual:.4g} (the median of the last observations). Hint: look at the data of those steps; a "
            "lower rate, a warm-up or global_clipnorm help against jumps."
        )
        self._lines += 1
        if self._reports:
            if self._lines <= _MOST_JUMP_LINES:
                logger.warning("%s", line)
            self._emit("spike", recent, last, line)

    def _nan(self, loss: float, steps: int | None) -> None:
        if self._on_nan == "stop":
            self.model.stop_training = True
        if self._said_nan:
            return
        self._said_nan = True
        # Where jumps are not looked for, no step is known at which the loss still was a number.
        before = f"; after step {self._seen[0]} it was still finite" if self._jumps_seen else ""
        since = "" if steps is None else f" (first seen after step {steps}{before})"
        line = (
            f"The loss of epoch {self._epoch + 1} is {loss}{since}: the weights are most likely lost. "
            "Hint: lower the learning rate, clip gradients (global_clipnorm), look for NaN in the data; "
            "keras.callbacks.TerminateOnNaN() ends training at the first one."
        )
        warnings.warn(line, stacklevel=2)
        if self._reports:
            self._emit("nan", loss, steps, line)

    def _emit(self, alarm: str, value: float, step: int | None, text: str) -> None:
        events.emit(events.Alarm(alarm, value, text, {"epoch": self._epoch, "epoch_step": step}))


class SilentAlarm(LossAlarm):
    """Stands in for the alarm in a `fit` whose loss is meant to diverge, such as a search for a rate."""

    def _check(self, steps: int | None, loss: Any) -> None:
        pass
