"""How fast training is between two moments: a mark at each, and what lies between them.

Only the steps count, with what they waited for: no validation, no callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from dtrain import progress

NAME = "examples_per_second"
"""The rate's name in logs and files."""

TRAINING = ("input", "compute", "communication")
"""The parts of the time that are steps."""


def training_seconds(parts: Mapping[str, float]) -> float:
    """Of seconds by part, those of steps."""
    return sum(parts[part] for part in TRAINING)


class Mark(NamedTuple):
    """Where the training of this process stands.

    Attributes:
        at: when, by `time.perf_counter`.
        steps: made so far.
        examples: seen so far, by the whole job.
        waiting: seconds until batches were there.
        seconds: of all steps.
    """

    at: float
    steps: int
    examples: progress.Examples
    waiting: float
    seconds: float

    def since(self, earlier: Mark) -> Figures:
        """What lies between two marks."""
        return Figures(
            self.steps - earlier.steps,
            self.seconds - earlier.seconds,
            self.examples.since(earlier.examples),
            self.waiting - earlier.waiting,
        )


class Figures(NamedTuple):
    """Some steps.

    Attributes:
        steps: how many.
        seconds: that they took.
        examples: in them; None where they were not counted.
        waiting: of the seconds, until batches were there.
    """

    steps: int
    seconds: float
    examples: int | None
    waiting: float

    @property
    def step_seconds(self) -> float | None:
        """A step; None if there was none."""
        return self.seconds / self.steps if self.steps > 0 else None

    @property
    def examples_per_second(self) -> float | None:
        """The rate; None where examples were not counted."""
        known = self.examples is not None and self.steps > 0 and self.seconds > 0
        return self.examples / self.seconds if known and self.examples is not None else None

    @property
    def data_wait(self) -> float | None:
        """The share of the time in which training waited for data, 0.0 to 1.0; None if there was no step."""
        return self.waiting / self.seconds if self.seconds > 0 else None


def mark() -> Mark:
    """Now."""
    parts = progress.ledger.seconds()
    return Mark(
        time.perf_counter(), progress.trained(), progress.examples(), parts["input"], training_seconds(parts)
    )
