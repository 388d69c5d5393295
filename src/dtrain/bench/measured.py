"""Reads the measurements of one run of a recipe from the run's files. It does not compare runs.

`run_reader.py` reads the files; here is what a bench needs of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigurationError
from dtrain.monitor import run_reader
from dtrain.monitor.line_files import finite
from dtrain.monitor.run_data import RATE as _RATE
from dtrain.monitor.run_data import RunData, summed
from dtrain.telemetry.training_rate import TRAINING


class UnusableError(Exception):
    """The files of a run are missing, damaged or not as planned; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one run.

    Attributes:
        seconds: duration of the whole run, including the start of its processes.
        history: for each metric its value after every epoch, including `examples_per_second`.
        final: loss and accuracy at the end, on the training, validation and test data.
        replicas: the number of replicas in the strategy.
        transport: the transport of the workers' all-reduce; "" without several workers.
        xla: whether XLA compiled the steps.
        data_wait: the share of the steps' time spent waiting for data, from 0 to 1; None if unknown.
        communication: the share of the steps' time spent on communication between workers; None if unknown.
        others: the share of the cores that other programs used during the run; None if unknown.
        goodput: the share of the run's wall time that went into steps which count; None if unknown.
    """

    seconds: float
    history: Mapping[str, Sequence[float]]
    final: Mapping[str, float | None]
    replicas: int
    transport: str = ""
    xla: bool = False
    data_wait: float | None = None
    communication: float | None = None
    others: float | None = None
    goodput: float | None = None

    @property
    def rates(self) -> list[float]:
        """Examples per second of every epoch except the first, which traces and compiles."""
        return list(self.history[_RATE][1:])

    @property
    def rate(self) -> float:
        """The median of `rates`."""
        return statistics.median(self.rates)

    @property
    def first_loss(self) -> float:
        """The training loss of the first epoch."""
        return self.history["loss"][0]

    @property
    def staleness(self) -> float | None:
        """The mean number of other workers' updates that a step misses; None if training is synchronous."""
        values = self.history.get("staleness")
        return statistics.fmean(values) if values else None

    def as_data(self) -> dict[str, Any]:
        """The measurements as a dictionary for JSON."""
        return asdict(self) | {"seconds": round(self.seconds, 2)}


def read_run(
    directory: Path, *, seconds: float, epochs: int, transport: str, others: float | None = None
) -> Measured:
    """Read the measurements of a finished run.

    Args:
        directory: the run directory.
        seconds: duration of the whole run.
        epochs: the planned number of epochs.
        transport: the planned transport of the all-reduce; "" accepts any.
        others: the share of the cores that other programs used, or None.

    Raises:
        UnusableError: a file is missing or damaged, the run has not finished all epochs, or its workers used
            another transport.
    """
    try:
        run = run_reader.read_run(directory)
    except ConfigurationError as error:
        raise UnusableError(f"its files cannot be read: {error.message}") from error
    record, rates = run.record, [epoch.examples_per_second for epoch in run.epochs]
    if not record:
        raise UnusableError(f"its files cannot be read: {' '.join(run.problems)}")
    if record.get("status") != "finished" or len(rates) != epochs or None in rates:
        raise UnusableError(f"it ended after {len(rates)} of {epochs} epochs")
    took = _entry(record, "communication").get("name", "")
    if transport and took != transport:
        raise UnusableError(f"its workers all-reduced over {took or 'nothing'}, and not over {transport}")
    replicas = finite(record.get("replicas"))
    if replicas is None:
        raise UnusableError("its run.json does not say how many replicas it had")
    names = set.intersection(*(set(epoch.logs) for epoch in run.epochs))
    series = {name: [epoch.logs[name] for epoch in run.epochs] for name in sorted(names)}
    shares = _shares(run)
    wait = shares["input"] if shares else finite(_entry(record, "input").get("share"))
    return Measured(
        seconds=seconds,
        history={name: _numbers(values) for name, values in {**series, _RATE: rates}.items()},
        final={name: finite(value) for name, value in _entry(record, "final_metrics").items()},
        replicas=int(replicas),
        transport=took,
        xla=bool(record.get("xla")),
        data_wait=wait,
        communication=shares["communication"] if shares and record.get("workers", 1) != 1 else None,
        others=others,
        goodput=None if run.goodput is None else run.goodput.share,
    )


def _entry(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    entry = record.get(name)
    return entry if isinstance(entry, dict) else {}


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _shares(run: RunData) -> dict[str, float]:
    """The share of each part in the steps' time, without the first epoch; empty if the run has no events."""
    parts = summed(epoch.parts for epoch in run.epochs if epoch.number > 0)
    whole = sum(parts.get(name, 0.0) for name in TRAINING)
    return {name: parts.get(name, 0.0) / whole for name in TRAINING} if whole else {}
