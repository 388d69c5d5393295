"""The callbacks that report on each `fit`: the times of its epochs, and losses that are not finite or jump.

`TimeReport` writes the times to the history, and logs what took a large share: callbacks, checkpoints,
waiting for data, a slow worker. `training_clock.py` measures them. `LossAlarm` reads the logs that Keras
gives its callbacks, and requests no others.
"""

from __future__ import annotations

import collections
import math
import os
import statistics
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import keras
import numpy as np

from dtrain.base.log import logger
from dtrain.engine.callbacks.prepared_callbacks import Stateless
from dtrain.engine.feed.input_advice import advice_for
from dtrain.engine.loops.worker_times import WorkerTimes
from dtrain.engine.replica.replica_reductions import unmeasured_parts
from dtrain.engine.step.steps import step_is_stock
from dtrain.errors import ConfigurationError
from dtrain.interfaces.managed_strategy import is_asynchronous
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.task import channel
from dtrain.telemetry import events
from dtrain.telemetry.events import PARTS
from dtrain.telemetry.training_clock import Mark, Totals, clock, is_slow, slow_line

OnNan = Literal["warn", "stop"]

_WATCHDOG_SECONDS = 15.0  # seconds of training after which a launcher can name a slow worker
# A part is reported as a cause of lost time above this share of an epoch's time,
_SHARES = {"checkpoint": 0.1, "callbacks": 0.2, "input": 0.2}
# and these seconds of it: in a short `fit`, any callback takes a large share.
_LEAST_SECONDS = {"checkpoint": 0.25, "callbacks": 1.0, "input": 0.25}
_HINTS = {
    "checkpoint": "save less often (save_freq), or on a faster disk",
    "callbacks": "do less in them, or less often; a callback that acts at every batch limits each call "
    "to one step",
}

_LOSSES_KEPT = 30  # the most recent losses whose median is the usual loss
_LOSSES_NEEDED = 8  # the fewest losses that give a usual loss
# A loss is a jump if it exceeds the usual loss by more than
_DEVIATIONS = 10.0  # standard deviations, estimated from the median absolute deviation,
_TIMES_USUAL = 1.0  # and by more than this times the usual loss.
_MOST_JUMP_LINES = 3  # warnings about jumps in one `fit`


class TimeReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Records where the time of each epoch of `fit` went, and how long training waited for data.

    `History` gets the attribute `time_report`, a list with a dictionary for each epoch:

    - `epoch`: its number, from 0.
    - `seconds`: wall time since the end of the previous epoch, or since the beginning of `fit`.
    - `steps`, `examples`: how many were trained on; `examples` is None if the number is not known.
    - `steady`: `steps`, `seconds`, `examples` and `waiting` of the steps for which nothing was traced, as in
      `training_rate.Figures`; `waiting` is None if it was not measured.
    - `unmeasured`: the parts of steps that count as "compute" (`replica_reductions.unmeasured_parts`); mostly
    empty.
    - `parts`: seconds by part (`events.PARTS`); their sum is `seconds`.
    - `callbacks`: seconds by class of callback.
    - `causes`: what took a large share of the time; a list of dictionaries with `cause`, `share` (0.0 to
      1.0), `text`, and `task` for a slow worker.
    - `workers`: for each worker `task`, `host`, `epoch`, `step_seconds`, `own_step_seconds`, `reading`,
      `between` and `parts`; empty on other workers than the first.

    Except under parameter servers, it also gets `input_report`: for each epoch a dictionary with `epoch`
    (from 0), `steps`, `seconds` (of those steps, waiting included), `waiting` (seconds of waiting for
    batches), `share` (`waiting` / `seconds`, 0.0 to 1.0) and, if there was a warning, `advice` (a list of
    lines). Steps for which something was traced or compiled do not count. An epoch in which nothing was
    measured is not listed.

    Args:
        layout: the layout of the strategy; None under parameter servers.
        data: what `fit` was given as `x`; the advice is about it.
    """

    async_safe = True  # it has no hook that is called at each batch

    def __init__(self, layout: ReplicaLayout | None = None, data: Any = None) -> None:
        super().__init__()
        self._layout = layout
        self._data = data
        self._epochs: list[dict[str, Any]] = []
        self._inputs: list[dict[str, Any]] = []
        self._workers = WorkerTimes(layout)
        # A `fit` inside another one logs nothing: its time counts for the outer `fit`.
        self._logs_causes = self._workers.first and not events.in_loop()
        self._logged: set[str] = set()
        self._logs: dict[str, Any] = {}
        self._ended = False  # whether an epoch has ended in this process
        self._advised = False  # whether a warning about the data has given its advice
        self._before = clock.mark()
        self._begun = self._before.totals, time.perf_counter(), time.process_time()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the lists on the model's `History`."""
        history = getattr(self.model, "history", None)
        if history is not None:
            history.time_report = self._epochs
            if self._layout is not None:
                history.input_report = self._inputs

    def get_state(self) -> dict[str, Any]:
        """The epochs, for a checkpoint."""
        return {"epochs": [dict(epoch) for epoch in self._epochs], "input": [dict(i) for i in self._inputs]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Replaces the epochs with those of a checkpoint; later epochs are appended to them."""
        self._epochs[:] = state["epochs"]
        self._inputs[:] = state.get("input", ())  # earlier versions kept it in another callback

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the clocks stand, for the waiting for data."""
        self._begun = clock.totals, time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch."""
        before, now = self._before, clock.mark()  # one mark for two epochs, so no time is lost
        self._before = now
        trained = now.trained.without(before.trained)
        if self._layout is not None and not trained.untimed:
            self._record_input(epoch, now.totals)
        record: dict[str, Any] = {
            "epoch": epoch,
            "seconds": 0.0,
            "steps": trained.steps,
            "examples": trained.known_examples,
            "steady": now.since(before).rounded(),
            "unmeasured": unmeasured_parts(self.model, reading=not trained.untimed),
            "parts": dict.fromkeys(PARTS, 0.0),
            "callbacks": {},
            "causes": [],
            "workers": [],
        }
        _add_time(record, before, now)
        self._workers.publish(epoch, before.totals, now.totals, record["parts"])
        self._epochs.append(record)
        self._find_causes(record)
        self._logs, self._ended = dict(logs or {}), True
        events.emit(events.EpochEnds(record, self._logs))

    def publish(self) -> None:
        """Sends this worker's last times to the first worker."""
        self._workers.publish_rest()

    def ended(self) -> None:
        """Adds the time since the last epoch to that epoch; called when `fit` has ended on all workers."""
        if not self._ended:  # all recorded epochs were restored from a checkpoint
            return
        last = self._epochs[-1]
        _add_time(last, self._before, clock.mark())
        self._find_causes(last, ended=True)
        events.emit(events.EpochEnds(last, self._logs))

    def _record_input(self, epoch: int, now: Totals) -> None:
        """Computes the share of waiting for data in the epoch, and warns if it is large."""
        before, wall, processor = self._begun
        steps, seconds = now.steps - before.steps, now.seconds - before.seconds
        if steps <= 0 or seconds <= 0:
            return
        waiting = now.reading - before.reading
        share = waiting / seconds
        record: dict[str, Any] = {
            "epoch": epoch,
            "steps": steps,
            "seconds": round(seconds, 6),
            "waiting": round(waiting, 6),
            "share": round(share, 4),
        }
        self._inputs.append(record)
        if share > _SHARES["input"] and waiting >= _LEAST_SECONDS["input"]:
            record["advice"] = advice_for(self._data, busy=_busy(wall, processor))
            self._warn_of_waiting(record)

    def _warn_of_waiting(self, found: Mapping[str, Any]) -> None:
        """Logs the warning: with the advice the first time in a `fit`, then without it."""
        layout = self._layout
        who = "Training" if layout is None or layout.workers == 1 else f"Worker {layout.worker}"
        line = (
            f"{who} waited for data in {100 * found['share']:.0f}% of the time of epoch {found['epoch'] + 1} "
            f"({found['waiting']:.2f} of {found['seconds']:.2f} s)."
        )
        if self._advised or not found["advice"]:
            logger.warning("%s", line)
            return
        self._advised = True
        logger.warning("%s Hint: %s.", line, "; ".join(found["advice"]))

    def _find_causes(self, found: dict[str, Any], *, ended: bool = False) -> None:
        """Finds what took a large share of an epoch's time, and logs each kind of cause once."""
        found["workers"] = self._workers.known()
        found["causes"] = [*_causes(found), *slow_worker(found["workers"])]
        for cause in found["causes"]:
            # Slow input was logged already, with advice.
            key = cause["cause"] + cause.get("task", "")
            if cause["cause"] == "input" or key in self._logged or not self._logs_causes:
                continue
            if cause["cause"] == "slow_worker" and self._launcher_reports(ended=ended):
                continue
            self._logged.add(key)
            logger.warning("%s", cause["text"])

    def _launcher_reports(self, *, ended: bool) -> bool:
        """Whether the launcher reports a slow worker; its watchdog cannot, if the `fit` was too short."""
        seconds = sum(epoch["seconds"] - epoch["parts"]["start"] for epoch in self._epochs)
        return channel.connected() and not (ended and seconds < _WATCHDOG_SECONDS)


def _add_time(record: dict[str, Any], before: Mark, now: Mark) -> None:
    """Adds the time between two marks to the record of an epoch."""
    parts, callbacks = record["parts"], record["callbacks"]
    for part in PARTS:
        parts[part] = round(parts[part] + now.parts[part] - before.parts[part], 6)
    for name, seconds in now.named.items():
        more = round(seconds - before.named.get(name, 0.0), 6)
        if more > 0:
            callbacks[name] = round(callbacks.get(name, 0.0) + more, 6)
    record["seconds"] = round(sum(parts.values()), 6)


def _busy(wall: float, processor: float) -> float:
    """The share of the cores that this process has used since two clocks were read, 0.0 to 1.0."""
    cores = len(os.sched_getaffinity(0))
    passed = time.perf_counter() - wall
    return (time.process_time() - processor) / (passed * cores) if passed > 0 else 0.0


def _causes(found: dict[str, Any]) -> list[dict[str, Any]]:
    causes = []
    # Shares are of the time without the start: building and compiling happen only once.
    seconds = found["seconds"] - found["parts"]["start"]
    for part, least in _SHARES.items():
        # Only waiting in steady steps counts: the first batch includes opening the data.
        spent = (found["steady"]["waiting"] or 0.0) if part == "input" else found["parts"][part]
        if seconds <= 0 or spent < _LEAST_SECONDS[part] or spent / seconds <= least:
            continue
        share = spent / seconds
        causes.append({"cause": part, "share": round(share, 4), "text": _words(found, part, spent, share)})
    return causes


def _words(found: dict[str, Any], part: str, spent: float, share: float) -> str:
    times = f"{100 * share:.0f}% of the time of epoch {found['epoch'] + 1} ({spent:.2f} s)"
    if part == "input":
        return f"Waiting for data took {times}."
    subject = "Checkpoints" if part == "checkpoint" else "Callbacks"
    named = [item for item in found["callbacks"].items() if clock.part_of(item[0]) == part]
    slowest = sorted(named, key=lambda item: -item[1])[:3]
    lines = [f"{name} {seconds:.2f} s" for name, seconds in slowest if seconds >= 0.1 * spent]
    which = f": {', '.join(lines)}" if lines else ""
    return f"{subject} took {times}{which}. Hint: {_HINTS[part]}."


def slow_worker(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cause for a time report if the workers wait for a slow worker: a list of one `cause`, or []."""
    own = {worker["task"]: worker for worker in workers if worker["own_step_seconds"] is not None}
    for task, worker in own.items():
        others = [other["own_step_seconds"] for name, other in own.items() if name != task]
        if not others:
            continue
        mine, usual = worker["own_step_seconds"], statistics.median(others)
        if is_slow(mine, usual, worker["step_seconds"]):
            line = slow_line(
                f"{task} ({worker['host']})",
                mine,
                usual,
                reading=worker["reading"],
                between=worker["between"],
            )
            share = min(1.0, (mine - usual) / max(worker["step_seconds"], 1e-9))
            return [{"cause": "slow_worker", "task": task, "share": round(share, 4), "text": f"{line}."}]
    return []


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
        self._jumps_seen = not is_asynchronous(self.model.distribute_strategy)

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
