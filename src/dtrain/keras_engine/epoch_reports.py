"""Reports on each epoch of a `fit`: where its time went, and how long it waited for data.

The numbers are in the history; what took a large share of the time is logged, with advice. The times are
measured by `dtrain.time_breakdown` and `dtrain.training_rate`, not here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from dtrain import channel, events, training_rate
from dtrain.keras_engine.input_advice import advice_for
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.slow_workers import WorkerTimes, slow_worker
from dtrain.log import logger
from dtrain.time_breakdown import PARTS, breakdown
from dtrain.training_rate import Totals, counter

_WATCHDOG_SECONDS = 15.0  # seconds of training after which a launcher can name a slow worker
_SHARES = {"checkpoint": 0.1, "callbacks": 0.2, "input": 0.2}
"""The share of an epoch's time above which a part is reported as a cause of lost time."""

_LEAST_SECONDS = {"checkpoint": 0.25, "callbacks": 1.0, "input": 0.25}
"""The seconds of an epoch below which it is not: in a short `fit`, any callback takes a large share."""

_HINTS = {
    "checkpoint": "save less often (save_freq), or to a faster disk",
    "callbacks": "do less in them, or less often; what they do at every batch makes each call one step",
}


class HistoryReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Collects one dictionary per epoch of a `fit`; `History` gets the list as an attribute.

    Args:
        attribute: the name of that attribute.

    Attributes:
        epochs: the dictionaries, by epoch.
    """

    async_safe = True  # it has no hook that is called at each batch

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self._attribute = attribute
        self.epochs: list[dict[str, Any]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the list on the model's `History`."""
        history = getattr(self.model, "history", None)
        if history is not None:
            setattr(history, self._attribute, self.epochs)

    def get_state(self) -> dict[str, Any]:
        """The epochs, for a checkpoint."""
        return {"epochs": [dict(each) for each in self.epochs]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Replaces the epochs with those of a checkpoint; later epochs are appended to them."""
        self.epochs[:] = state["epochs"]


class InputReport(HistoryReport):
    """Measures in each epoch of `fit` how long training waited for data.

    `History` gets the attribute `input_report`: for each epoch a dictionary with `epoch` (from 0), `steps`,
    `seconds` (of those steps, waiting included), `waiting` (seconds of waiting for batches), `share`
    (`waiting` / `seconds`, 0.0 to 1.0) and, if there was a warning, `advice` (a list of lines). Steps for
    which something was traced or compiled do not count. An epoch in which nothing was measured is not listed.

    Args:
        data: what `fit` was given as `x`; the advice is about it.
        worker: the number of this worker, for messages; None where there is only one.
    """

    def __init__(self, data: Any = None, *, worker: int | None = None) -> None:
        super().__init__("input_report")
        self._data = data
        self._worker = worker
        self._begun = counter.totals
        self._clock = self._processor = 0.0
        self._advised = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the counts and the clocks at the beginning of the epoch."""
        self._begun = counter.totals
        self._clock, self._processor = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Computes the share of waiting in the epoch, and warns if it is large."""
        now, before = counter.totals, self._begun
        steps = now.steps - before.steps
        waiting = now.reading - before.reading
        seconds = now.seconds - before.seconds
        if steps <= 0 or seconds <= 0:
            return
        share = waiting / seconds
        found: dict[str, Any] = {
            "epoch": epoch,
            "steps": steps,
            "seconds": round(seconds, 6),
            "waiting": round(waiting, 6),
            "share": round(share, 4),
        }
        self.epochs.append(found)
        if share > _SHARES["input"] and waiting >= _LEAST_SECONDS["input"]:
            found["advice"] = advice_for(self._data, busy=self._busy())
            self._warn(found)

    def _busy(self) -> float:
        """The share of the cores that this process has used since the epoch began, 0.0 to 1.0."""
        wall = time.perf_counter() - self._clock
        cores = len(os.sched_getaffinity(0))
        return (time.process_time() - self._processor) / (wall * cores) if wall > 0 else 0.0

    def _warn(self, found: dict[str, Any]) -> None:
        """Logs the warning: with the advice the first time in a `fit`, then without it."""
        who = "Training" if self._worker is None else f"Worker {self._worker}"
        line = (
            f"{who} waited for data in {100 * found['share']:.0f}% of the time of epoch {found['epoch'] + 1} "
            f"({found['waiting']:.2f} of {found['seconds']:.2f} s)."
        )
        if self._advised or not found["advice"]:
            logger.warning("%s", line)
            return
        self._advised = True
        logger.warning("%s Hint: %s.", line, "; ".join(found["advice"]))


class TimeReport(HistoryReport):
    """Records where the time of each epoch of `fit` went.

    `History` gets the attribute `time_report`, a list with a dictionary for each epoch:

    - `epoch`: its number, from 0.
    - `seconds`: wall time since the end of the previous epoch, or since the beginning of `fit`.
    - `steps`, `examples`: how many were trained on; `examples` is None if the number is not known.
    - `steady`: `steps`, `seconds`, `examples` and `waiting` of the steps for which nothing was traced, as in
      `training_rate.Figures`.
    - `parts`: seconds by part (`time_breakdown.PARTS`); their sum is `seconds`.
    - `callbacks`: seconds by class of callback.
    - `causes`: what took a large share of the time; a list of dictionaries with `cause`, `share` (0.0 to
      1.0), `text`, and `task` for a slow worker.
    - `workers`: for each worker `task`, `host`, `epoch`, `step_seconds`, `own_step_seconds`, `reading`,
      `between` and `parts`; empty on other workers than the first.

    Args:
        layout: the layout of the strategy; None under parameter servers.
    """

    def __init__(self, layout: ReplicaLayout | None = None) -> None:
        super().__init__("time_report")
        self._workers = WorkerTimes(layout)
        # A `fit` inside another one logs nothing: its time counts for the outer `fit`.
        self._logs_causes = self._workers.first and not events.in_loop()
        self._logged: set[str] = set()
        self._logs: dict[str, Any] = {}
        self._ended = False  # whether an epoch has ended in this process
        self._before = _snapshot()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch."""
        before, now = self._before, _snapshot()
        self._before = now
        parts = {part: round(now.mark.parts[part] - before.mark.parts[part], 6) for part in PARTS}
        callbacks = {name: round(each - before.named.get(name, 0.0), 6) for name, each in now.named.items()}
        found: dict[str, Any] = {
            "epoch": epoch,
            "seconds": round(sum(parts.values()), 6),
            "steps": now.mark.trained.steps - before.mark.trained.steps,
            "examples": now.mark.trained.examples.since(before.mark.trained.examples),
            "steady": _rounded(now.mark.since(before.mark)),
            "parts": parts,
            "callbacks": {name: each for name, each in callbacks.items() if each > 0},
            "causes": [],
            "workers": [],
        }
        self._workers.publish(epoch, before.totals, now.totals, parts)
        self.epochs.append(found)
        self._find_causes(found)
        self._logs, self._ended = dict(logs or {}), True
        events.emit(events.EpochEnds(found, self._logs))

    def publish(self) -> int:
        """Sends this worker's last times to the first worker.

        Returns:
            How many messages this process has sent so far.
        """
        return self._workers.publish_rest()

    def ended(self, published: Sequence[int]) -> None:
        """Adds the time since the last epoch to that epoch; called when `fit` has ended on all workers.

        Args:
            published: what `publish` returned on each worker.
        """
        if not self._ended:  # all recorded epochs were restored from a checkpoint
            return
        last, before, now = self.epochs[-1], self._before, _snapshot()
        for part in PARTS:
            more = now.mark.parts[part] - before.mark.parts[part]
            last["parts"][part] = round(last["parts"][part] + more, 6)
        for name, each in now.named.items():
            more = each - before.named.get(name, 0.0)
            if more > 0:
                last["callbacks"][name] = round(last["callbacks"].get(name, 0.0) + more, 6)
        last["seconds"] = round(sum(last["parts"].values()), 6)
        self._find_causes(last, published)
        events.emit(events.EpochEnds(last, self._logs))

    def _find_causes(self, found: dict[str, Any], published: Sequence[int] | None = None) -> None:
        """Finds what took a large share of an epoch's time, and logs each kind of cause once."""
        found["workers"] = self._workers.known(published)
        found["causes"] = [*_causes(found), *slow_worker(found["workers"])]
        for cause in found["causes"]:
            # The input report logs slow input, with advice.
            key = cause["cause"] + cause.get("task", "")
            if cause["cause"] == "input" or key in self._logged or not self._logs_causes:
                continue
            if cause["cause"] == "slow_worker" and self._launcher_tells(ended=published is not None):
                continue
            self._logged.add(key)
            logger.warning("%s", cause["text"])

    def _launcher_tells(self, *, ended: bool) -> bool:
        """Whether the launcher reports a slow worker; its watchdog cannot, if the `fit` was too short."""
        seconds = sum(each["seconds"] - each["parts"]["start"] for each in self.epochs)
        return channel.connected() and not (ended and seconds < _WATCHDOG_SECONDS)


class _CounterValues(NamedTuple):
    """All counters at one moment; the same snapshot ends an epoch and begins the next, so no time is lost."""

    mark: training_rate.Mark
    named: dict[str, float]
    totals: Totals


def _snapshot() -> _CounterValues:
    return _CounterValues(training_rate.mark(), breakdown.named(), counter.totals)


def _rounded(figures: training_rate.Figures) -> dict[str, Any]:
    found = figures._asdict()
    return found | {name: round(found[name], 6) for name in ("seconds", "waiting")}


def _causes(found: dict[str, Any]) -> list[dict[str, Any]]:
    causes = []
    # Shares are of the time without the start: building and compiling happen only once.
    seconds = found["seconds"] - found["parts"]["start"]
    for part, least in _SHARES.items():
        # Only waiting in steady steps counts: the first batch includes opening the data.
        spent = found["steady"]["waiting"] if part == "input" else found["parts"][part]
        if seconds <= 0 or spent < _LEAST_SECONDS[part] or spent / seconds <= least:
            continue
        share = spent / seconds
        causes.append({"cause": part, "share": round(share, 4), "text": _words(found, part, spent, share)})
    return causes


def _words(found: dict[str, Any], part: str, spent: float, share: float) -> str:
    times = f"{100 * share:.0f}% of the time of epoch {found['epoch'] + 1} ({spent:.2f} s)"
    if part == "input":
        return f"Waiting for data took {times}."
    what = "Checkpoints" if part == "checkpoint" else "Callbacks"
    slowest = [f"{name} {each:.2f} s" for name, each in _slowest(found, part) if each >= 0.1 * spent]
    which = f": {', '.join(slowest)}" if slowest else ""
    return f"{what} took {times}{which}. Hint: {_HINTS[part]}."


def _slowest(found: dict[str, Any], part: str) -> list[tuple[str, float]]:
    named = [item for item in found["callbacks"].items() if breakdown.part_of(item[0]) == part]
    return sorted(named, key=lambda item: -item[1])[:3]
