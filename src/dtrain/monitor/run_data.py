"""What is known of one run, as plain values: what its files say, put in order.

It holds; `dtrain.monitor.run_reader` fills it from a directory, and `dtrain.monitor.report` shows it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dtrain import training_rate
from dtrain.monitor.event_file import finite

State = Literal["finished", "failed", "running", "left", "unknown"]
"""`left`: begun, not ended, and no process is at work on it. `unknown`: whether one is cannot be seen."""

RATE = training_rate.NAME
"""The name of the rate in Keras' logs, where it is no metric."""

STEP_COLUMNS = (RATE, "step_seconds", "data_wait", "loss", "learning_rate")


_FEWEST = 3


def summed(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of values by name."""
    total: dict[str, float] = {}
    for each in several:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


@dataclass(frozen=True)
class Steps:
    """What was noted about once a second of training, as columns of one length. NaN stands for no value.

    Attributes:
        clock: seconds trained until then; pauses between two attempts do not count.
        step: steps since the start of training.
        values: for each of STEP_COLUMNS its values.
        seconds, steps: of training since the note before; steps for which something was traced do not count.
    """

    clock: array[float] = field(default_factory=lambda: array("d"))
    step: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    steps: array[float] = field(default_factory=lambda: array("d"))
    values: Mapping[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in STEP_COLUMNS}
    )

    def has(self, column: str) -> bool:
        """Whether a column has enough values for a curve."""
        return sum(value == value for value in self.values[column]) >= _FEWEST

    @cached_property
    def counted(self) -> list[int]:
        """Where in the columns stands what counts: not the steps that a later attempt made again."""
        kept: list[int] = []
        least = math.inf
        for place in range(len(self.step) - 1, -1, -1):
            if self.step[place] < least:
                least = self.step[place]
                kept.append(place)
        return kept[::-1]

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the usual step, the median; None without any."""
        timed = sorted((s / n, n) for s, n in zip(self.seconds, self.steps, strict=True) if s == s and n > 0)
        half, before = sum(n for _, n in timed) / 2, 0.0
        for seconds, steps in timed:
            before += steps
            if before >= half:
                return seconds
        return None


@dataclass(frozen=True)
class WorkerEpoch:
    """One worker in one epoch. `own_step_seconds` is a step without what it waited for others."""

    task: str
    host: str
    step_seconds: float | None
    own_step_seconds: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Cause:
    """What an epoch's time was lost to: `share` of it, from 0 to 1, and a sentence."""

    cause: str
    share: float | None
    text: str


@dataclass(frozen=True)
class Epoch:
    """One epoch, the number counted from 0. What is not known is None or empty.

    `steady` are the steps for which nothing was traced; `parts` are seconds that add up to `seconds`,
    `callbacks` those of each; `logs` are Keras' logs, with None for NaN.
    """

    number: int
    steps: int | None = None
    seconds: float | None = None
    examples_per_second: float | None = None
    steady: training_rate.Figures | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    callbacks: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, float | None] = field(default_factory=dict)
    workers: tuple[WorkerEpoch, ...] = ()
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Alarm:
    """Something that should be looked at: `kind` is "nan", "spike" or the like."""

    kind: str
    time: float
    epoch: int | None
    step: int | None
    value: float | None
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """A state that was saved, and for how many seconds training stood still."""

    time: float
    step: int | None
    seconds: float | None
    text: str


@dataclass(frozen=True)
class Attempt:
    """One start of the program: its first and last sign of life, and how it ended if it said so."""

    number: int
    began: float
    last: float
    strategy: str
    workers: int | None
    replicas: int | None
    first_epoch: int | None
    status: str

    @property
    def seconds(self) -> float:
        """From its first to its last sign of life."""
        return max(self.last - self.began, 0.0)


@dataclass(frozen=True, kw_only=True)
class EventSummary:
    """What the events of a run say.

    Attributes:
        epochs: in order, each once.
        end: the status that the last attempt ended with; "" if it did not say.
        last: the time of the last event.
    """

    epochs: tuple[Epoch, ...] = ()
    steps: Steps = field(default_factory=Steps)
    alarms: tuple[Alarm, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    end: str = ""
    last: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run(EventSummary):
    """One run: what its events say, and its other files.

    Attributes:
        path: its directory.
        name: what it is called in a report; no two runs of a report have the same.
        record: `run.json`, unchecked; empty where there is none that can be read.
        state: whether it has ended, and how.
        state_text: the same in words.
        scalars: values of TensorBoard's that are not by epoch: step and value.
        problems: what of its files could not be read.
        sources: the files that were read.
    """

    path: Path
    name: str
    record: Mapping[str, Any]
    state: State
    state_text: str
    scalars: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, over all epochs."""
        return summed(epoch.parts for epoch in self.epochs)

    def clock(self, time: float) -> float:
        """How many seconds had been trained at a Unix time, without the pauses between attempts."""
        before = 0.0
        for attempt in self.attempts[:-1]:
            if time <= attempt.last:
                break
            before += attempt.seconds
        else:
            attempt = self.attempts[-1]
        return before + min(max(time - attempt.began, 0.0), attempt.seconds)

    def epoch_position(self, epoch: int | None, step: int | None) -> float | None:
        """Where on an axis of epochs something happened; epoch number k, from 0, ends at k + 1."""
        if epoch is None:
            return None
        before = sum(each.steps or 0 for each in self.epochs if each.number < epoch)
        inside = next((each.steps for each in self.epochs if each.number == epoch), None)
        if step is None or not inside:
            return epoch + 0.5
        return epoch + min(max((step - before) / inside, 0.0), 1.0)

    def final(self, metric: str) -> float | None:
        """A metric's last value: what the record says of a finished run, else that of the last epoch."""
        recorded = self.record.get("final_metrics")
        if isinstance(recorded, dict) and metric in recorded:
            return finite(recorded[metric])
        for epoch in reversed(self.epochs):
            if metric in epoch.logs:
                return epoch.logs[metric]
        return None
