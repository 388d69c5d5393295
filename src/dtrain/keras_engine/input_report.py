"""Measures how long training waits for its data: numbers in the history, and warnings with advice.

The numbers are those of `dtrain.step_counts`; what helps is `input_advice.py`'s to find.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dtrain.keras_engine.input_advice import advice_for
from dtrain.keras_engine.own_callbacks import HistoryReport
from dtrain.log import logger
from dtrain.step_counts import counter

WARN_SHARE = 0.2
"""From this part of an epoch's time on, waiting for data is worth a warning."""

_LEAST_SECONDS = 0.25  # of waiting in an epoch: less is not worth anybody's time


class InputReport(HistoryReport):
    """Measures in each epoch of `fit` how long training waited for data.

    `History` gets the attribute `input_report`: a dictionary an epoch with `epoch` (from 0), `steps`,
    `seconds` (of those steps, the waiting included), `waiting` (seconds until batches were there), `share`
    (of the one in the other, 0.0 to 1.0) and `advice` (a list of lines, of epochs with a warning). Steps that
    were traced or compiled do not count. An epoch in which nothing was measured is not listed.

    Args:
        data: what `fit` was given as `x`, from which advice is found.
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
        """Notes where the epoch begins."""
        self._begun = counter.totals
        self._clock, self._processor = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Computes the epoch's share, and warns if it is large."""
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
        if share > WARN_SHARE and waiting >= _LEAST_SECONDS:
            found["advice"] = advice_for(self._data, busy=self._busy())
            self._warn(found)

    def _busy(self) -> float:
        """Which part of the cores this process had in use since the epoch began."""
        wall = time.perf_counter() - self._clock
        cores = len(os.sched_getaffinity(0))
        return (time.process_time() - self._processor) / (wall * cores) if wall > 0 else 0.0

    def _warn(self, found: dict[str, Any]) -> None:
        """In full once a `fit`, then in one short line an epoch."""
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
