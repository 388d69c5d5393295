"""What a `fit` leaves in a run's directory: the callbacks that write while it trains, and the final record.

`Monitor`, `dtrain.Trainer` and the recipes share it. The record's form is `record.py`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from dtrain import job
from dtrain.keras_engine.functions import trained_in_xla
from dtrain.monitor.curves import drawn, plot_curves
from dtrain.monitor.event_log import EventLog
from dtrain.monitor.record import finish_record, parameters_of
from dtrain.monitor.run_directory import RunDirectory
from dtrain.training_rate import NAME as RATE
from dtrain.training_rate import of_report


def run_callbacks(run: RunDirectory, record: dict[str, Any]) -> list[keras.callbacks.Callback]:
    """Those that write `metrics.csv`, TensorBoard's files and `events.jsonl`; `RateLogs` comes before."""
    return [
        keras.callbacks.CSVLogger(str(run.metrics)),
        keras.callbacks.TensorBoard(str(run.tensorboard)),
        EventLog(run.events, record),
    ]


def ended_record(
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
        record: what `describe_run` gave.
        model: what was trained.
        history: what `fit` returned.
        begun: when the run began, by `time.perf_counter`.
        tested: metrics beside those of the last epoch.
        epochs: the time report of all epochs, where there were several fits; by default the history's.
    """
    report = getattr(history, "time_report", ()) if epochs is None else epochs
    last = {name: series[-1] for name, series in history.history.items() if series and name != RATE}
    return finish_record(
        record,
        examples_per_second=of_report(report),
        wall_time_seconds=time.perf_counter() - begun,
        final_metrics={**(tested or {}), **last},
        xla=trained_in_xla(model),
        parameters=parameters_of(model),
        input_report=getattr(history, "input_report", None),
        time_report=report,
    )


def write_end(
    run: RunDirectory, record: dict[str, Any], history: keras.callbacks.History, *, title: str
) -> None:
    """Has the chief draw the curves and write the final record."""
    if job.is_chief():
        drawn(run.curves, lambda path: plot_curves(history.history, path, title=title))
        run.write_record(record)
