"""What is happening, and what came of it? The run's directory, its record, its curves and its speed.

It reports on training and never steers it. `dtrain.monitor.throughput` imports Keras; the rest does not.
"""

from __future__ import annotations

from dtrain.monitor.curves import plot_curves
from dtrain.monitor.record import describe_run, finish_record, summarize
from dtrain.monitor.run_directory import (
    RunDirectory,
    check_run_directory,
    lock_run_directory,
    open_run_directory,
    read_record,
)

__all__ = [
    "RunDirectory",
    "check_run_directory",
    "describe_run",
    "finish_record",
    "lock_run_directory",
    "open_run_directory",
    "plot_curves",
    "read_record",
    "summarize",
]
