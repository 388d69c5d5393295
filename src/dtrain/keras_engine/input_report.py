"""Measures how long training waits for its data: numbers in the history, and warnings with advice.

It measures no step itself: the numbers are those of `dtrain.step_counts`. The advice comes from
`input_advice.py`.
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
"""A warning is logged if waiting for data takes a larger share of an epoch's time than this."""

_LEAST_SECONDS = 0.25  # no warning if an epoch waits less than this


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
        if share > WARN_SHARE and waiting >= _LEAST_SECONDS:
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
