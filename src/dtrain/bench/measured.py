"""What one run of a recipe has measured, read from the files that it left.

`run.json` and `metrics.csv` are there for every run; `events.jsonl` tells more where there is one.
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
    """A run's files are not what the plan has asked for; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        seconds: of the whole run, with the start of its processes.
        history: for each name its value after every epoch; `examples_per_second` among them.
        final: loss and accuracy at the end, of the training, the validation and the test data.
        replicas: as the strategy counts them.
        transport: what several workers added up by; "" elsewhere.
        xla: whether XLA compiled the steps.
        data_wait: the share of the time for which training waited for data; None where it is not known.
        communication: the share of the time for which workers waited for each other; likewise.
        others: the share of the cores that other programs took while it ran; likewise.
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
        """Examples a second of every epoch but the first, which traces and compiles."""
        return list(self.history[_RATE][1:])

    @property
    def rate(self) -> float:
        """Their median."""
        return statistics.median(self.rates)

    @property
    def first_loss(self) -> float:
        """The training loss of the first epoch."""
        return self.history["loss"][0]

    @property
    def staleness(self) -> float | None:
        """How many updates of others a step has missed, in the mean; None where training is synchronous."""
        values = self.history.get("staleness")
        return statistics.fmean(values) if values else None

    def seconds_by_epoch(self, examples: int) -> list[float]:
        """Seconds of training from its start to the end of every epoch, validation not counted."""
        total, found = 0.0, []
        for rate in self.history[_RATE]:
            total += examples / rate
            found.append(total)
        return found

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"seconds": round(self.seconds, 2)}


def read_run(
    directory: Path, *, seconds: float, epochs: int, transport: str, others: float | None = None
) -> Measured:
    """What a finished run has measured.

    Args:
        directory: of the run.
        seconds: how long all of it took.
        epochs: how many it was to make.
        transport: what its workers were to add up by; "" if that does not matter.
        others: the share of the cores that other programs took.

    Raises:
        UnusableError: a file is missing or damaged, or the run was another than the plan's.
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
    """The parts of the steps' time, in all epochs but the first; {} where nothing tells them."""
    epochs: dict[int, dict[str, Any]] = {}
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # cut off in the writing
            continue
        if isinstance(event, dict) and event.get("kind") == "epoch":
            epochs[event.get("epoch", 0)] = event
    measured = [event for number, event in epochs.items() if number > 0]
    # Of the steps' time: what callbacks and validation take is not the strategies'.
    seconds = {
        name: sum(event.get("parts", {}).get(name, 0.0) for event in measured)
        for name in ("input", "compute", "communication")
    }
    whole = sum(seconds.values())
    return {name: part / whole for name, part in seconds.items()} if whole else {}
