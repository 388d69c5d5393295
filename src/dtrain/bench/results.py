"""The results of a bench: speeds relative to one device, and whether each row gives one device's numbers.

A ratio of speeds is taken within each round, between runs close in time; the median over the rounds counts.
This module starts no run.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from dtrain import __version__
from dtrain.bench.bench_plan import ONE_CORE, ONE_DEVICE, BenchOptions, Row
from dtrain.bench.measured import Measured
from dtrain.monitor.origin import command
from dtrain.strategies.machine import Machine

TOLERANCE = 2e-4
"""The largest relative difference of the first epoch's loss from one device's that counts as the same."""


@dataclass
class RowResult:
    """A row and its measurements.

    Attributes:
        row: the planned row.
        runs: one entry a round; None if the run of that round is missing.
        problem: why the measurements of some or all rounds are missing; "" if there are all.
        failed: whether a run of the row was started and failed.
        tail: the last lines of output of the failed run.
    """

    row: Row
    runs: list[Measured | None] = field(default_factory=list)
    problem: str = ""
    failed: bool = False
    tail: tuple[str, ...] = ()

    @property
    def measured(self) -> list[Measured]:
        """The runs that are not missing."""
        return [run for run in self.runs if run is not None]

    def median(self, value: Callable[[Measured], float | None]) -> float | None:
        """The median of `value` over the rounds; None if it is None in all rounds."""
        numbers = [number for number in map(value, self.measured) if number is not None]
        return statistics.median(numbers) if numbers else None


@dataclass
class Results:
    """All rows of a bench, and the comparisons between them.

    Attributes:
        asked: the options of the bench.
        machine: the machine that it ran on.
        outcomes: one for each row, in the order of the plan.
        started_at: the time at which it began, in ISO format.
        seconds: its duration so far.
        load_before: the load average over one minute when it began.
        status: "running", "finished" or "interrupted".
    """

    asked: BenchOptions
    machine: Machine
    outcomes: list[RowResult]
    started_at: str = field(
        default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    )
    seconds: float = 0.0
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    status: str = "running"

    def of(self, key: str) -> RowResult | None:
        """The outcome of the row with this key; None if the plan has no such row."""
        return next((outcome for outcome in self.outcomes if outcome.row.key == key), None)

    @property
    def base(self) -> RowResult | None:
        """The row that speed-ups and efficiencies are relative to: one device on one core, or on one GPU."""
        return self.of(ONE_CORE) or self.of(ONE_DEVICE)

    def times(self, outcome: RowResult, base: RowResult | None) -> float | None:
        """The speed relative to the row `base`: the median over the rounds that both have, or None."""
        pairs = zip(outcome.runs, base.runs if base is not None else (), strict=False)
        ratios = [mine.rate / other.rate for mine, other in pairs if mine is not None and other is not None]
        return statistics.median(ratios) if ratios else None

    def efficiency(self, outcome: RowResult) -> float | None:
        """The speed-up over the base divided by the number of replicas; None if replicas share cores."""
        times = self.times(outcome, self.base)
        return times / outcome.row.replicas if times is not None and outcome.row.own_core else None

    def loss_difference(self, outcome: RowResult) -> float | None:
        """The largest relative difference, over all rounds, of the first epoch's loss from one device's.

        None if a measurement is missing, or if the row is the one device itself.
        """
        reference = self.of(ONE_DEVICE)
        if reference is None or outcome is reference or not reference.measured:
            return None
        loss = reference.measured[0].first_loss
        return max((abs(run.first_loss / loss - 1) for run in outcome.measured), default=None)

    def same(self, outcome: RowResult) -> bool | None:
        """Whether the row gives the numbers of one device; None if it need not, or if that is unknown."""
        apart = self.loss_difference(outcome)
        promised = outcome.row.synchronous and not self.asked.what.random
        return None if apart is None or not promised else apart <= TOLERANCE

    def succeeded(self) -> bool:
        """Whether no run failed, and every row that should give the numbers of one device does."""
        return not any(o.failed or self.same(o) is False for o in self.outcomes)

    def as_data(self) -> dict[str, Any]:
        """All results as a dictionary for JSON."""
        model = self.asked.what
        return {
            "version": 1,
            "kind": "bench",
            "status": self.status,
            "started_at": self.started_at,
            "seconds": round(self.seconds, 1),
            "command": command(),
            "asked": asdict(self.asked) | {"epochs": model.epochs, "examples": model.examples},
            "machine": asdict(self.machine) | {"load_before": self.load_before},
            "versions": {
                "dtrain": __version__,
                "tensorflow": self.machine.tensorflow,
                "keras": self.machine.keras,
                "python": sys.version.partition(" ")[0],
            },
            "tolerance": TOLERANCE,
            "rows": [self._row(outcome) for outcome in self.outcomes],
        }

    def _row(self, outcome: RowResult) -> dict[str, Any]:
        row = outcome.row
        rate = outcome.median(lambda run: run.rate)
        return {
            **asdict(row),
            "synchronous": row.synchronous,
            "problem": outcome.problem,
            "failed": outcome.failed,
            "tail": list(outcome.tail),
            "examples_per_second": rate,
            "step_seconds": None if rate is None else self.asked.global_batch / rate,
            "times_one_core": self.times(outcome, self.base),
            "times_one_device": self.times(outcome, self.of(ONE_DEVICE)),
            "efficiency": self.efficiency(outcome),
            "data_wait": outcome.median(lambda run: run.data_wait),
            "communication": outcome.median(lambda run: run.communication),
            "goodput": outcome.median(lambda run: run.goodput),
            "staleness": outcome.median(lambda run: run.staleness),
            "others": outcome.median(lambda run: run.others),
            "first_loss_apart": self.loss_difference(outcome),
            "same_as_one_device": self.same(outcome),
            "final": dict(outcome.measured[0].final) if outcome.measured else None,
            "runs": [None if run is None else run.as_data() for run in outcome.runs],
        }
