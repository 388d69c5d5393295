"""Reports where the time of each epoch of a `fit` went, and which worker was slow.

`TimeReport` writes the times to the history, and logs what took a large share: callbacks, checkpoints,
waiting for data, a slow worker. `training_clock.py` measures them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import keras

from dtrain.base.log import logger
from dtrain.engine.feed.input_advice import advice_for
from dtrain.engine.loops.worker_times import WorkerTimes
from dtrain.engine.replica.replica_reductions import unmeasured_parts
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.task import channel
from dtrain.telemetry import events
from dtrain.telemetry.events import PARTS
from dtrain.telemetry.training_clock import Mark, Totals, clock, is_slow, slow_line

_WATCHDOG_SECONDS = 15.0  # seconds of training after which a launcher can name a slow worker


# A part is reported as a cause of lost time above this share of an epoch's time,
_SHARES = {"checkpoint": 0.1, "callbacks": 0.2, "input": 0.2}


# and these seconds of it: in a short `fit`, any callback takes a large share.
_LEAST_SECONDS = {"checkpoint": 0.25, "callbacks": 1.0, "input": 0.25}


# A warning follows when the epochs so far have lost these seconds to it: a short run has nothing to save.
_LOST_SECONDS = 5.0


_HINTS = {
    "checkpoint": "save less often (save_freq), or on a faster disk",
    "callbacks": "do less in them, or less often; a callback that acts at every batch limits each call "
    "to one step",
}


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
        """Finds what took a large share of an epoch's time, and logs each kind of cause once it matters."""
        found["workers"] = self._workers.known()
        found["causes"] = [*_causes(found), *slow_worker(found["workers"])]
        for cause in found["causes"]:
            # Slow input was logged already, with advice.
            key = cause["cause"] + cause.get("task", "")
            if cause["cause"] == "input" or key in self._logged or not self._logs_causes:
                continue
            if cause["cause"] == "slow_worker":
                if self._launcher_reports(ended=ended):
                    continue
            elif self._lost(key) < _LOST_SECONDS:
                continue
            self._logged.add(key)
            logger.warning("%s", cause["text"])

    def _lost(self, part: str) -> float:
        """The seconds that a part took in the epochs in which it was a cause."""
        named = [each for each in self._epochs if any(c["cause"] == part for c in each["causes"])]
        return sum((each["parts"][part] for each in named), 0.0)

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
