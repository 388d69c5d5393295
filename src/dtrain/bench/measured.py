"""Reads the measurements of one run of a recipe from the run's files. It does not compare runs.

`run.json` and `metrics.csv` are required; the time by part is read from `events.jsonl` if it exists.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.training_rate import NAME as _RATE


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

    def seconds_by_epoch(self, examples: int) -> list[float]:
        """Seconds of training from its start to the end of each epoch, without validation.

        Args:
            examples: number of training examples in an epoch.
        """
        total, found = 0.0, []
        for rate in self.history[_RATE]:
            total += examples / rate
            found.append(total)
        return found

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
        record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        with (directory / "metrics.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        names = [name for name in (lines[0] if lines else {}) if name != "epoch"]
        history = {name: [float(line[name]) for line in lines] for name in names}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UnusableError(f"its files cannot be read: {error}") from error
    if record.get("status") != "finished" or len(lines) != epochs or _RATE not in history:
        raise UnusableError(f"it ended after {len(lines)} of {epochs} epochs")
    took = record.get("communication", {}).get("name", "")
    if transport and took != transport:
        raise UnusableError(f"its workers added up over {took or 'nothing'}, and not over {transport}")
    shares = _shares(directory / "events.jsonl")
    wait = shares["input"] if shares else record.get("input", {}).get("share")
    return Measured(
        seconds=seconds,
        history=history,
        final={name: _number(value) for name, value in record["final_metrics"].items()},
        replicas=record["replicas"],
        transport=took,
        xla=bool(record.get("xla")),
        data_wait=wait,
        communication=shares["communication"] if shares and record.get("workers", 1) > 1 else None,
        others=others,
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _shares(events: Path) -> dict[str, float]:
    """The share of each part in the steps' time, over all epochs after the first; {} if unknown."""
    epochs: dict[int, dict[str, Any]] = {}
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # an incomplete line
            continue
        if isinstance(event, dict) and event.get("kind") == "epoch":
            epochs[event.get("epoch", 0)] = event
    measured = [event for number, event in epochs.items() if number > 0]
    # Only parts of the steps' time: callbacks and validation do not depend on the strategy.
    seconds = {
        name: sum(event.get("parts", {}).get(name, 0.0) for event in measured)
        for name in ("input", "compute", "communication")
    }
    whole = sum(seconds.values())
    return {name: part / whole for name, part in seconds.items()} if whole else {}
