"""What came of a bench: speeds against one device, and whether the numbers are its.

All ratios are taken within a round, of runs that followed each other; their median over the rounds counts.
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
from dtrain.bench.measured import Measured
from dtrain.bench.plan import ONE_CORE, ONE_DEVICE, Asked, Row
from dtrain.monitor.origin import command
from dtrain.strategies.machine import Machine

TOLERANCE = 2e-4
"""How far the loss of the first epoch may be from one device's, relative to it."""


@dataclass
class Outcome:
    """A row and what came of it.

    Attributes:
        row: what was planned.
        runs: by round; None where the run of a round is missing.
        problem: why it has no numbers, or not of all rounds; "" if all is well.
        failed: whether it was tried.
        tail: the last lines of the run that failed.
    """

    row: Row
    runs: list[Measured | None] = field(default_factory=list)
    problem: str = ""
    failed: bool = False
    tail: tuple[str, ...] = ()

    @property
    def measured(self) -> list[Measured]:
        """The runs that there are."""
        return [run for run in self.runs if run is not None]

    def median(self, value: Callable[[Measured], float | None]) -> float | None:
        """Of a value over the rounds; None where no round has it."""
        found = [each for each in map(value, self.measured) if each is not None]
        return statistics.median(found) if found else None


@dataclass
class Results:
    """All rows of a bench, and what follows from them together.

    Attributes:
        asked: what the user asked for.
        machine: where it ran.
        outcomes: in the order of the plan.
        started_at: when, in words.
        seconds: how long it took until now.
        load_before: how many processes wanted a core when it began, as Linux tells it.
        status: "running", "finished" or "interrupted".
    """

    asked: Asked
    machine: Machine
    outcomes: list[Outcome]
    started_at: str = field(
        default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    )
    seconds: float = 0.0
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    status: str = "running"

    def of(self, key: str) -> Outcome | None:
        """The outcome of a row, or None where the plan has no such row."""
        return next((outcome for outcome in self.outcomes if outcome.row.key == key), None)

    @property
    def base(self) -> Outcome | None:
        """What speed-ups and efficiency are told against: one device on one core, or on a GPU."""
        return self.of(ONE_CORE) or self.of(ONE_DEVICE)

    def times(self, outcome: Outcome, base: Outcome | None) -> float | None:
        """How many times as fast as another row it is: the median of the rounds that both have."""
        pairs = zip(outcome.runs, base.runs if base is not None else (), strict=False)
        found = [mine.rate / other.rate for mine, other in pairs if mine is not None and other is not None]
        return statistics.median(found) if found else None

    def efficiency(self, outcome: Outcome) -> float | None:
        """The speed-up over the base, over the replicas; None where they have no cores of their own."""
        times = self.times(outcome, self.base)
        return times / outcome.row.replicas if times is not None and outcome.row.own_core else None

    def apart(self, outcome: Outcome) -> float | None:
        """How far the loss of the first epoch is from one device's, relative to it: the most of all rounds.

        None where it cannot be told, or where the row is what others are compared with.
        """
        reference = self.of(ONE_DEVICE)
        if reference is None or outcome is reference or not reference.measured:
            return None
        loss = reference.measured[0].first_loss
        return max((abs(run.first_loss / loss - 1) for run in outcome.measured), default=None)

    def same(self, outcome: Outcome) -> bool | None:
        """Whether its numbers are one device's; None where that is not promised or cannot be told."""
        apart = self.apart(outcome)
        promised = outcome.row.synchronous and not self.asked.what.random
        return None if apart is None or not promised else apart <= TOLERANCE

    def well(self) -> bool:
        """Whether all that can run here did, and gave the numbers that it promises."""
        return not any(o.failed or self.same(o) is False for o in self.outcomes)

    def as_data(self) -> dict[str, Any]:
        """All of it, for JSON."""
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

    def _row(self, outcome: Outcome) -> dict[str, Any]:
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
            "staleness": outcome.median(lambda run: run.staleness),
            "others": outcome.median(lambda run: run.others),
            "first_loss_apart": self.apart(outcome),
            "same_as_one_device": self.same(outcome),
            "final": dict(outcome.measured[0].final) if outcome.measured else None,
            "runs": [None if run is None else run.as_data() for run in outcome.runs],
        }
