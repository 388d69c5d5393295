"""Monitoring of a run: its directory, its record, its events, its curves and its speed.

It reports on training and does not steer it, except that `Monitor(on_nan="stop")` ends training. Names that
need Keras are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtrain.monitor.curve_image import plot_curves
from dtrain.monitor.run_directory import (
    RunDirectory,
    check_run_directory,
    lock_run_directory,
    open_run_directory,
    read_record,
)
from dtrain.monitor.run_record import describe_run, finish_record, summarize

if TYPE_CHECKING:
    from dtrain.engine.callbacks.progress_bar import ProgressBar
    from dtrain.monitor.monitor import Monitor
    from dtrain.monitor.trackers import on_chief

__all__ = [
    "Monitor",
    "ProgressBar",
    "RunDirectory",
    "check_run_directory",
    "describe_run",
    "finish_record",
    "lock_run_directory",
    "on_chief",
    "open_run_directory",
    "plot_curves",
    "read_record",
    "summarize",
]

_LAZY = {
    "Monitor": "dtrain.monitor.monitor",
    "ProgressBar": "dtrain.engine.callbacks.progress_bar",
    "on_chief": "dtrain.monitor.trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
