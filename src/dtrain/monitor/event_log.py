"""Writes `events.jsonl`: one line for each event of a run, as it happens.

Only the chief writes. If the file cannot be written, one warning is logged and training continues. A process
that a later attempt has replaced gets an error. This module does not read the file; `line_files.py` does.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from dtrain.base import safe_files
from dtrain.base.log import logger
from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.environments import settings
from dtrain.interfaces.managed_strategy import managed
from dtrain.monitor.elapsed import elapsed, process_began, run_begins
from dtrain.monitor.json_text import without_nan
from dtrain.monitor.run_directory import RunDirectory, check_attempt
from dtrain.monitor.run_record import VERSION
from dtrain.process_group import ranks
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import clock
from dtrain.telemetry.training_rate import of_epoch

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT
_INTERVAL = 1.0  # seconds between two lines about steps
_MOST_OF_A_STEP = 200  # communications of a step that a line lists, the largest ones


class EventLog(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Writes steps (about once a second), epochs with their time by part, alarms, checkpoints and the end.

    Args:
        path: the file; lines are appended.
        record: the run's record (`describe_run`); its strategy, replicas and workers go into the first line.
    """

    dtrain_every_batch = False

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        super().__init__()
        self._path = path
        self._about = {name: record[name] for name in ("strategy", "replicas", "workers")}
        self._writes = ranks.is_chief()
        self._file: Any = None
        self._lock = threading.Lock()
        self._epoch = 0
        self._first_epoch: int | None = None
        self._steps_before = 0  # steps of training when the epoch began
        self._in_epoch = 0
        self._mark = clock.mark()
        self._opened = run_begins(path) if self._writes else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to listen to the engine's events; the first line is written at the first epoch."""
        self._first_epoch = None
        if self._writes:
            events.listen(self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """At the first epoch, writes a line that describes the run."""
        params = self.params or {}
        steps = params.get("steps")
        # A resumed run begins with a later epoch, or within one.
        resumed = clock.resumed if self._first_epoch is None else None
        before = self._steps_before + self._in_epoch if resumed is None else resumed.step - resumed.done
        self._steps_before = epoch * steps if steps else before
        self._in_epoch = 0 if resumed is None else resumed.done
        self._epoch, self._mark = epoch, clock.mark()
        if self._first_epoch is None:
            self._first_epoch = epoch
            self._write(
                "begin",
                version=VERSION,
                attempt=settings.attempt(),
                epochs=params.get("epochs"),
                steps=steps,
                first_epoch=epoch,
                **self._about,
                **self._start(),
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a line about the steps, if a second has passed since the last one."""
        self._in_epoch = int(batch + 1)
        if not self._writes or clock.now() - self._mark.at < _INTERVAL:
            return
        before, self._mark = self._mark, clock.mark()
        if self._mark.trained.steps <= before.trained.steps:
            return
        figures = self._mark.since(before)
        self._write(
            "steps",
            epoch=self._epoch,
            steps=figures.steps,
            seconds=round(figures.seconds, 6),
            examples=figures.examples,
            examples_per_second=_rounded(figures.examples_per_second, 2),
            step_seconds=_rounded(figures.step_seconds, 8),
            data_wait=_rounded(figures.data_wait, 4),
            loss=(logs or {}).get("loss"),
            learning_rate=_rate(self.model),
            **self._reached(),
        )

    def _start(self) -> dict[str, Any]:
        """What goodput needs to know of the start of this process and of the attempt before."""
        failed_at, failed_step = settings.last_failure() or (None, None)
        return {
            **({} if self._opened is None else {"opened": self._opened}),
            "job_began": settings.job_began(),
            "failed_at": failed_at,
            "failed_step": failed_step,
            **self._reached(),
        }

    def _reached(self) -> dict[str, Any]:
        """How far training has come, and what this process has spent by then."""
        step = self._steps_before + self._in_epoch
        return {"step": step, "process": process_began(), "elapsed": elapsed()}

    def _handle_epoch_ends(self, event: events.EpochEnds) -> None:
        rate = _rounded(of_epoch(event.record).examples_per_second, 2)
        self._write("epoch", **event.record, examples_per_second=rate, logs=event.logs, **self._reached())

    def _handle_alarm(self, event: events.Alarm) -> None:
        step = self._steps_before + (event.place.get("epoch_step") or self._in_epoch)
        place = {"epoch": self._epoch, "step": step, **event.place}
        self._write("alarm", **place, alarm=event.alarm, value=event.value, text=event.text)

    def _handle_step_divided(self, event: events.StepDivided) -> None:
        if event.train and self._writes:
            plan = event.describe()
            largest = sorted(plan["communications"], key=lambda communication: -(communication["bytes"] or 0))
            self._write("plan", **plan | {"communications": largest[:_MOST_OF_A_STEP]})

    def _handle_checkpoint_saved(self, event: events.CheckpointSaved) -> None:
        self._write("checkpoint", epoch=self._epoch, **event._asdict())

    def _handle_fit_ends(self, event: events.FitEnds) -> None:
        self._write("end", status=event.status, **self._reached())
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, kind: str, **facts: Any) -> None:
        if not self._writes:
            return
        check_attempt(RunDirectory(self._path.parent))
        facts = without_nan({"kind": kind, "time": round(time.time(), 3), **facts})
        line = json.dumps(facts, allow_nan=False, default=_number)
        try:
            with self._lock:
                if self._file is None:
                    descriptor = safe_files.open_regular(self._path, _APPEND)
                    self._file = os.fdopen(descriptor, "a+", encoding="utf-8")
                    _end_torn_line(self._file)
                self._file.write(line + "\n")
                self._file.flush()
        except OSError as error:
            self._writes = False
            logger.warning("%s cannot be written: %s. Training continues without it.", self._path, error)


def _rounded(value: float | None, places: int) -> float | None:
    return None if value is None else round(value, places)


def _rate(model: Any) -> float | None:
    """The current learning rate; None if it is unknown, or if reading it needs a parameter server."""
    try:
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if managed(model.distribute_strategy).asynchronous is not None:
            return None
        return float(np.asarray(optimizer.learning_rate))
    except Exception:  # an optimizer of the user's own may be anything
        return None


def _number(value: Any) -> float | str | None:
    """Converts a tensor, an array or a user's object for JSON: a number, None if not finite, or text."""
    try:
        number = float(np.asarray(value))
    except (TypeError, ValueError):
        return str(value)
    return number if np.isfinite(number) else None


def _end_torn_line(file: Any) -> None:
    """Ends an incomplete last line, which a killed process may have left, with a newline."""
    size = os.fstat(file.fileno()).st_size
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        file.write("\n")
