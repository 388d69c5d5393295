"""Warns when the loss is NaN or infinite, and when it jumps.

It looks at the logs that callbacks get, so at each call of the train function, and asks for no others.
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

from dtrain import events
from dtrain.errors import ConfigurationError
from dtrain.keras_engine.own_callbacks import Stateless
from dtrain.keras_engine.protocol import servers_of
from dtrain.keras_engine.steps import step_is_stock
from dtrain.log import logger

OnNan = Literal["warn", "stop"]

_BEFORE = 30  # looks that say what is usual,
_LEAST = 8  # and how many there must be
_DEVIATIONS = (
    10.0  # of the usual loss (median absolute ones, as standard deviations), from which on it is a jump,
)
_TIMES = 1.0  # if it is also so many times the usual loss more
_MOST_LINES = 3  # about jumps, in a `fit`


class LossAlarm(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Warns, once a process, when the loss is no number, and at most three times in a `fit` when it jumps.

    A jump is a loss, over the steps since the look before, that is more than twice the median of the looks
    before and far outside of what they vary by. Under parameter servers jumps are not looked for.

    Args:
        on_nan: "warn", or "stop" to end training, too, on all workers after the same step.
        reports: whether this process warns of jumps, and emits alarms.
    """

    dtrain_every_batch = False

    def __init__(self, on_nan: OnNan = "warn", *, reports: bool = True) -> None:
        super().__init__()
        if on_nan not in ("warn", "stop"):
            raise ConfigurationError(f"on_nan is {on_nan!r}.", hint='"warn" or "stop"')
        self._on_nan = on_nan
        self._reports = reports
        # Training is ended where all workers are at the same step; a warning may come from another thread.
        self.async_safe = on_nan == "warn"
        self._lock = threading.Lock()
        self._losses: collections.deque[float] = collections.deque(maxlen=_BEFORE)
        self._said_nan = False
        self._lines = 0
        self._jumps = False
        self._epoch = 0
        self._seen = (0, 0.0)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets an earlier `fit`."""
        self._losses.clear()
        self._said_nan, self._lines, self._jumps = False, 0, False
        self._means = step_is_stock(self.model, "train_step")
        # Parameter servers' logs are of the steps that are done, which are others than those of the call.
        self._jumps_seen = servers_of(self.model.distribute_strategy) is None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The logs' means begin anew."""
        self._epoch, self._seen = epoch, (0, 0.0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the loss so far."""
        self._look(int(batch + 1), (logs or {}).get("loss"))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks the epoch's loss."""
        self._look(None, (logs or {}).get("loss"))

    def _look(self, steps: int | None, loss: Any) -> None:
        if loss is None or np.size(loss) != 1:
            return
        value = float(np.asarray(loss).reshape(()))
        with self._lock:
            if not math.isfinite(value):
                self._nan(value, steps)
            elif steps is not None and steps > self._seen[0] and self._jumps_seen:
                self._new(steps, value)

    def _new(self, steps: int, loss: float) -> None:
        """The loss of the steps since the last look; Keras' logs are means over the epoch's steps."""
        before, old = self._seen
        self._seen = (steps, loss)
        recent = (loss * steps - old * before) / (steps - before) if self._means else loss
        usual = statistics.median(self._losses) if len(self._losses) >= _LEAST else None
        if usual is not None and self._is_jump(recent, usual):
            if not self._jumps:
                self._jump(before + 1, steps, recent, usual)
            self._jumps = True
            return
        self._jumps = False
        self._losses.append(recent)

    def _is_jump(self, recent: float, usual: float) -> bool:
        spread = 1.4826 * statistics.median(abs(each - usual) for each in self._losses)
        return recent - usual > max(_DEVIATIONS * spread, _TIMES * abs(usual))

    def _jump(self, first: int, last: int, recent: float, usual: float) -> None:
        where = f"step {last}" if first >= last else f"steps {first} to {last}"
        line = (
            f"The loss jumped to {recent:.4g} in {where} of epoch {self._epoch + 1}; before it was "
            f"{usual:.4g} (the median of the last looks). Hint: look at the data of those steps; a lower "
            "rate, a warm-up or global_clipnorm help against jumps."
        )
        self._lines += 1
        if self._reports:
            if self._lines <= _MOST_LINES:
                logger.warning("%s", line)
            self._emit("spike", recent, last, line)

    def _nan(self, loss: float, steps: int | None) -> None:
        if self._on_nan == "stop":
            self.model.stop_training = True
        if self._said_nan:
            return
        self._said_nan = True
        # Where jumps are not looked for, no step is known at which the loss still was a number.
        before = f"; after step {self._seen[0]} it was not" if self._jumps_seen else ""
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
