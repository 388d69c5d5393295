"""The files of a `fit` in a run's directory: callbacks that write during training, and the final record.

`Monitor`, `dtrain.Trainer` and the recipes share it. It does not define the entries of the record;
`run_record.py` does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.engine.fit.build import trained_in_xla
from dtrain.monitor.curve_image import drawn, plot_curves
from dtrain.monitor.elapsed import elapsed, process_began
from dtrain.monitor.event_log import EventLog
from dtrain.monitor.goodput import goodput_of
from dtrain.monitor.line_files import read_events
from dtrain.monitor.run_directory import RunDirectory, check_attempt
from dtrain.monitor.run_record import divided_sizes, finish_record, parameters_of
from dtrain.process_group import ranks
from dtrain.telemetry.training_rate import NAME as RATE
from dtrain.telemetry.training_rate import of_report


def run_callbacks(run: RunDirectory, record: dict[str, Any]) -> list[keras.callbacks.Callback]:
    """The callbacks for `metrics.csv`, TensorBoard's files and `events.jsonl`; put `RateLogs` before them."""
    return [
        Fence(run),
        keras.callbacks.CSVLogger(str(run.metrics)),
        keras.callbacks.TensorBoard(str(run.tensorboard)),
        EventLog(run.events, record),
    ]


class Fence(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a process that was replaced while it was stopped or cut off, before the next callbacks write."""

    dtrain_every_batch = False

    def __init__(self, run: RunDirectory) -> None:
        super().__init__()
        self._run = run

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raises a `ConfigurationError` if a later attempt has taken the run directory over."""
        if ranks.is_chief():
            check_attempt(self._run)

    def on_train_end(self, logs: Any = None) -> None:
        """As `on_epoch_end`."""
        self.on_epoch_end(0)


def ended_record(
    run: RunDirectory,
    record: Mapping[str, Any],
    model: keras.Model,
    history: keras.callbacks.History,
    *,
    begun: float,
    tested: Mapping[str, float] | None = None,
    epochs: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The record of a run whose `fit` has ended.

    Args:
        run: the run's directory.
        record: the record from `describe_run`.
        model: the trained model.
        history: the result of `fit`.
        begun: the `time.perf_counter()` at which the run began.
        tested: further metrics, such as those on the test data.
        epochs: the time reports of all epochs, if there were several fits; None takes the history's.
    """
    report = getattr(history, "time_report", ()) if epochs is None else epochs
    last = {name: series[-1] for name, series in history.history.items() if series and name != RATE}
    quorum = getattr(history, "quorum_report", None)
    return finish_record(
        record,
        examples_per_second=of_report(report),
        wall_time_seconds=time.perf_counter() - begun,
        final_metrics={**(tested or {}), **last},
        xla=trained_in_xla(model),
        parameters=parameters_of(model),
        divided=divided_sizes(model),
        input_report=getattr(history, "input_report", None),
        time_report=report,
        goodput=_goodput(run, quorum) if ranks.is_chief() else None,
        quorum=quorum,
    )


def _goodput(run: RunDirectory, quorum: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The goodput of a run that ends now, over all attempts; None if its events cannot be read.

    Args:
        run: the run's directory.
        quorum: what the rounds of a quorum have used and lacked (`QuorumReport`); None without a quorum.
    """
    now = {"kind": "now", "time": time.time(), "process": process_began(), "elapsed": elapsed()}
    try:
        goodput = goodput_of(itertools.chain(read_events(run.events), [now]))
    except OSError:
        return None
    if goodput is None:
        return None
    if quorum:
        # The events tell of the first worker, so its own absence counts there.
        away = quorum["away_seconds"] - quorum["first_away_seconds"]
        goodput = goodput.without(away / quorum["workers"])
    return goodput.as_record()


def write_end(
    run: RunDirectory, record: dict[str, Any], history: keras.callbacks.History, *, title: str
) -> None:
    """On the chief, draws the curves and writes the final record; does nothing on other workers."""
    if ranks.is_chief():
        drawn(run.curves, lambda path: plot_curves(history.history, path, title=title))
        run.write_record(record)
