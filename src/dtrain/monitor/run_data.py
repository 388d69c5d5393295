"""The data of one run, read from its files, as dataclasses.

These classes neither read nor show it: `dtrain.monitor.run_reader` reads a directory, and
`dtrain.monitor.report` makes the page.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from dtrain.monitor.goodput import Goodput
from dtrain.monitor.line_files import finite
from dtrain.telemetry import training_rate

State = Literal["finished", "failed", "running", "left", "unknown"]
"""`left`: not finished, and no process trains it. `unknown`: it cannot be determined if a process does."""

RATE = training_rate.NAME
"""The name of the training rate in Keras' logs; there it is no metric."""

STEP_COLUMNS = (RATE, "step_seconds", "data_wait", "loss", "learning_rate")


_FEWEST = 3


def summed(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum the values of each name over all mappings."""
    total: dict[str, float] = {}
    for values in several:
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + value
    return total


@dataclass(frozen=True)
class Steps:
    """The `steps` events of a run, about one a second, as columns of one length. NaN means no value.

    Attributes:
        clock: seconds since the run began, without the pauses between two attempts.
        step: number of steps since the start of training.
        seconds: seconds of training since the previous event, without steps in which a function was traced.
        steps: number of steps since the previous event, without those in which a function was traced.
        values: for each of STEP_COLUMNS its values.
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
        """The places in the columns of the events that count: steps that a later attempt repeated do not."""
        kept: list[int] = []
        least = math.inf
        for place in range(len(self.step) - 1, -1, -1):
            if self.step[place] < least:
                least = self.step[place]
                kept.append(place)
        return kept[::-1]

    @property
    def step_seconds(self) -> float | None:
        """The median seconds of a step, weighted by the steps of each event; None without any event."""
        timed = sorted((s / n, n) for s, n in zip(self.seconds, self.steps, strict=True) if s == s and n > 0)
        half, before = sum(n for _, n in timed) / 2, 0.0
        for seconds, steps in timed:
            before += steps
            if before >= half:
                return seconds
        return None


@dataclass(frozen=True)
class WorkerEpoch:
    """One worker in one epoch. `own_step_seconds` is the time of a step without waiting for other workers."""

    task: str
    host: str
    step_seconds: float | None
    own_step_seconds: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Cause:
    """A cause of an epoch's lost time: its `share` of the epoch's time, from 0 to 1, and a sentence."""

    cause: str
    share: float | None
    text: str


@dataclass(frozen=True)
class Epoch:
    """One epoch; `number` counts from 0. Unknown values are None or empty.

    `steady` are the figures of the steps in which no function was traced. `parts` are the seconds of each
    part; their sum is `seconds`. `unmeasured` are the parts whose time within steps counts as computing.
    `callbacks` are the seconds of each callback. `logs` are Keras' logs, with None for NaN.
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
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunAlarm:
    """A problem that the run reported: `kind` is "nan", "spike" or similar."""

    kind: str
    time: float
    epoch: int | None
    step: int | None
    value: float | None
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint; `seconds` is how long training was blocked."""

    time: float
    step: int | None
    seconds: float | None
    text: str


@dataclass(frozen=True)
class PlannedCommunication:
    """One value that the replicas made whole together in each step: a sum, or rows that they gathered.

    `of` is the operation that computes it, `needed_by` the one that needs it whole, and `line` the user's
    line. In a loop or branch (`nested`) it is made as often as the body runs.
    """

    kind: str
    round: int | None
    bytes: int | None
    nested: bool
    of: str
    needed_by: str
    line: str


@dataclass(frozen=True)
class GatheredOperation:
    """An operation that each replica computes from all rows, and the bytes that are gathered for it."""

    operation: str
    name: str
    line: str
    bytes: int | None


@dataclass(frozen=True)
class CommunicationPlan:
    """What the replicas communicated in each training step; `communications` are the largest ones."""

    rows: int | None
    rounds: int | None
    sums: int | None
    gathers: int | None
    sum_bytes: int | None
    gather_bytes: int | None
    communications: tuple[PlannedCommunication, ...] = ()
    gathered: tuple[GatheredOperation, ...] = ()


@dataclass(frozen=True)
class RunAttempt:
    """One attempt: one start of the program. `began` and `last` are the times of its first and last event.

    `pause` are the seconds since the last event of the attempt before; None for the first attempt.
    `epochs` is how many epochs training has in all, and `steps` how many steps an epoch has. `status` is the
    status of its `end` event, "" if it wrote none.
    """

    number: int
    pause: float | None
    began: float
    last: float
    strategy: str
    workers: int | None
    replicas: int | None
    epochs: int | None
    steps: int | None
    first_epoch: int | None
    status: str

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last event of the attempt."""
        return max(self.last - self.began, 0.0)


@dataclass(frozen=True, kw_only=True)
class EventSummary:
    """The events of a run, sorted by kind.

    Attributes:
        epochs: in order, each once.
        steps: the `steps` events as columns.
        alarms: in the order of the events.
        checkpoints: in the order of the events.
        attempts: in order.
        plan: what the replicas communicated in each step; None if no step was divided.
        end: the status with which the last attempt ended; "" if it wrote no `end` event.
        goodput: where the wall time of all attempts went; None if the events do not say so.
        last: the Unix time of the last event; None without events.
    """

    epochs: tuple[Epoch, ...] = ()
    steps: Steps = field(default_factory=Steps)
    alarms: tuple[RunAlarm, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    attempts: tuple[RunAttempt, ...] = ()
    plan: CommunicationPlan | None = None
    end: str = ""
    goodput: Goodput | None = None
    last: float | None = None

    @property
    def checkpoint_distance(self) -> int | None:
        """The most steps from a checkpoint to the next one; None for fewer than two checkpoints."""
        steps = sorted({saved.step for saved in self.checkpoints if saved.step is not None})
        return max((after - before for before, after in pairwise(steps)), default=None)


@dataclass(frozen=True, kw_only=True)
class RunData(EventSummary):
    """One run: the data of its events and of its other files.

    Attributes:
        path: its directory.
        name: its name in a report; no two runs of a report have the same name.
        record: the content of `run.json`, unchecked; empty if it is missing or cannot be read.
        state: whether and how the run has ended.
        state_text: the state in words.
        problems: one sentence for each part of its files that could not be read.
        sources: the files that were read.
    """

    path: Path
    name: str
    record: Mapping[str, Any]
    state: State
    state_text: str
    problems: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, summed over all epochs."""
        return summed(epoch.parts for epoch in self.epochs)

    def epoch_position(self, epoch: int | None, step: int | None) -> float | None:
        """The position of a step on an axis of epochs; epoch number k, from 0, ends at k + 1."""
        if epoch is None:
            return None
        before = sum(other.steps or 0 for other in self.epochs if other.number < epoch)
        inside = next((other.steps for other in self.epochs if other.number == epoch), None)
        if step is None or not inside:
            return epoch + 0.5
        return epoch + min(max((step - before) / inside, 0.0), 1.0)

    def final(self, metric: str) -> float | None:
        """The last value of a metric: from the record's final metrics, else from the last epoch with it."""
        recorded = self.record.get("final_metrics")
        if isinstance(recorded, dict) and metric in recorded:
            return finite(recorded[metric])
        for epoch in reversed(self.epochs):
            if metric in epoch.logs:
                return epoch.logs[metric]
        return None
