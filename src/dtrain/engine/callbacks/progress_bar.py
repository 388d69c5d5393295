"""The progress bar of a job: examples per second, time per step, waiting for data, time left, and the logs.

It replaces Keras' bar in `fit` under a strategy of dtrain's, on the first worker only; `evaluate` and
`predict` keep Keras' bar. On a terminal it is one line that changes; in a file or a pipe it is a line every
ten seconds and one at the end of each epoch.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from dtrain.base.log import logger
from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.telemetry import training_rate
from dtrain.telemetry.training_clock import clock
from dtrain.telemetry.training_rate import Figures

_WIDTH = 20  # the bar's width in characters
_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0
_WINDOW_SECONDS = 5.0  # rates are means over about this time


class ProgressBar(Stateless, keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """Shows the progress of a `fit`; in `callbacks` it replaces Keras' bar.

    A line shows the steps done of the epoch; the time left of the epoch and, after a comma, of all epochs;
    the time per step; the examples per second of the whole job; the share of the time in which training
    waited for data, if it is at least 1%; and the logs. `verbose=2` prints one line an epoch, `verbose=0`
    none.

    Example:
        ```python
        strategy = dtrain.strategy("mirrored")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        model.fit(np.ones((64, 4)), np.ones((64, 1)), callbacks=[dtrain.monitor.ProgressBar()])
        ```
    """

    async_safe = True

    target: int | None  # steps of an epoch; None while Keras does not know the number

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._rate = _Rate()
        self._drawn_at = 0.0
        self._drawn = 0  # characters of the line that the terminal shows now
        self._epoch = 0
        self._begun = 0.0
        self._fit_begun = 0.0
        self._first_epoch: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock of the whole `fit`."""
        self._fit_begun, self._first_epoch = time.perf_counter(), None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints which epoch begins."""
        self.seen = 0
        self._epoch, self._begun = epoch, time.perf_counter()
        if self._first_epoch is None:
            self._first_epoch = epoch
        self._rate.begin()
        self._drawn_at = self._begun
        self._drawn = 0
        if self.verbose and self.epochs > 1:
            _write(f"Epoch {epoch + 1}/{self.epochs}\n")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Redraws the bar, if the redraw interval has passed."""
        if self.verbose != 1:
            self.seen = max(self.seen, int(batch + 1))
            return
        now = time.perf_counter()
        with self._lock:
            self.seen = max(self.seen, int(batch + 1))
            self._rate.note()
            if now - self._drawn_at < (_REDRAW_SECONDS if _is_live() else _LINE_SECONDS):
                return
            self._drawn_at = now
            self._draw(logs or {}, now, over=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Draws the bar of the finished epoch."""
        now = time.perf_counter()
        with self._lock:
            self._rate.note()
            if self.target is None:
                self.target = self.seen
            self.seen = self.seen or self.target
            if self.verbose:
                self._draw(logs or {}, now, over=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Prints nothing for the evaluation of an epoch."""

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints nothing."""

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Prints nothing."""

    def _draw(self, logs: Mapping[str, Any], now: float, *, over: bool) -> None:
        live = _is_live() and self.verbose == 1
        line, characters = self._line(logs, now, over=over, coloured=live)
        # Spaces overwrite the end of a longer previous line.
        spaces = " " * max(0, self._drawn - characters)
        _write(("\r" if live else "") + line + (spaces if live else "") + ("\n" if over or not live else ""))
        self._drawn = 0 if over else characters

    def _line(self, logs: Mapping[str, Any], now: float, *, over: bool, coloured: bool) -> tuple[str, int]:
        """The line, and the number of characters that a terminal shows of it."""
        target = self.target
        count = f"{self.seen:{len(str(target))}d}/{target}" if target else f"{self.seen:7d}/Unknown"
        words = [f"{count} {_bar(self.seen / target)}" if target else count]
        words.append(_duration(now - self._begun) if over else self._left(now))
        rate = self._rate.epoch() if over else self._rate.now()
        if rate.step_seconds is not None:
            words.append(f"{_short(rate.step_seconds)}/step")
        details = []
        if rate.examples_per_second is not None:
            details.append(f"{_count(rate.examples_per_second)} examples/s")
        if rate.data_wait is not None and rate.data_wait >= 0.01:
            details.append(f"data wait {100 * rate.data_wait:.0f}%")
        details += [f"{name}: {_value(value)}" for name, value in logs.items() if name != training_rate.NAME]
        line = " - ".join([" ".join(word for word in words if word), *details])
        characters = len(line)
        return (line.replace(count, f"\x1b[1m{count}\x1b[0m", 1) if coloured else line), characters

    def _left(self, now: float) -> str:
        """The time left of the epoch and of all epochs, as text; the time so far if the steps are unknown."""
        if not self.target or not self.seen:
            return _duration(now - self._begun)
        step_seconds = (now - self._begun) / self.seen
        epoch = step_seconds * (self.target - self.seen)
        first = self._epoch if self._first_epoch is None else self._first_epoch
        done = self._epoch - first
        later = self.epochs - self._epoch - 1
        if later <= 0:
            return f"{_duration(epoch)} left"
        # The time of a finished epoch includes its validation.
        whole = (self._begun - self._fit_begun) / done if done else step_seconds * self.target
        return f"{_duration(epoch)} left, {_duration(epoch + later * whole)} in all"


class _Rate:
    """The training rate over the last seconds, and since the epoch began."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Restarts both rates, because an epoch begins."""
        self._first = self._last = clock.mark()
        self._window = [self._first]

    def note(self) -> None:
        """Notes that steps were made."""
        self._last = clock.mark()
        if len(self._window) > 1 and self._last.at - self._window[-1].at < _REDRAW_SECONDS:
            return
        self._window.append(self._last)
        while len(self._window) > 2 and self._last.at - self._window[1].at > _WINDOW_SECONDS:
            self._window.pop(0)

    def now(self) -> Figures:
        """The figures of the last `_WINDOW_SECONDS`."""
        return self._last.since(self._window[0])

    def epoch(self) -> Figures:
        """The figures of the epoch so far."""
        return self._last.since(self._first)


def _bar(share: float) -> str:
    full = int(_WIDTH * min(1.0, share))
    return "━" * full + "─" * (_WIDTH - full)


def _duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _short(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g}s"
    return f"{1e3 * seconds:.3g}ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g}us"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _value(value: Any) -> str:
    """A log's value as Keras' bar prints it."""
    try:
        number = float(np.mean(value))
    except (TypeError, ValueError):
        return str(value)
    if not math.isfinite(number):
        return str(number)
    return f"{number:.4f}" if abs(number) > 1e-3 else f"{number:.4e}"


def _is_live() -> bool:
    """Whether standard output lets a written line be overwritten: a terminal or a notebook."""
    return bool(getattr(sys.stdout, "isatty", lambda: False)()) or "ipykernel" in sys.modules


def _write(text: str) -> None:
    if keras.config.is_interactive_logging_enabled():
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # as in Keras' own bar: replaces characters that the stream cannot encode
            encoding = sys.stdout.encoding or "ascii"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    elif text.strip():
        logger.info("%s", text.strip())
