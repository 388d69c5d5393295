"""How fast training is between two moments: a mark at each, and what lies between them.

Only steps count, with what they waited for: no validation, no callbacks, and no steps for which something was
traced or compiled. All rates and step times that dtrain reports are computed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dtrain.step_counts import Counts, counter
from dtrain.time_breakdown import breakdown

NAME = "examples_per_second"
"""The rate's name in logs and files."""

TRAINING = ("input", "compute", "communication")
"""The parts of the time that are steps."""


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


class Mark(NamedTuple):
    """Where the training of this process stands.

    Attributes:
        at: when, by `time.perf_counter`.
        parts: seconds so far, by part.
        trained: all steps so far.
        traced: of them, those for which something was traced.
    """

    at: float
    parts: dict[str, float]
    trained: Counts
    traced: Counts

    def since(self, earlier: Mark, *, start: bool = False) -> Figures:
        """What lies between two marks.

        Args:
            earlier: the first of them.
            start: whether steps for which something was traced count, too, with all that this took.
        """
        traced = Counts() if start else self.traced
        traced_before = Counts() if start else earlier.traced
        spent = {part: seconds - earlier.parts[part] for part, seconds in self.parts.items()}
        reading = traced.reading - traced_before.reading
        training = sum(spent[part] for part in TRAINING) + (spent["start"] if start else 0.0)
        examples = self.trained.examples.without(traced.examples)
        return Figures(
            self.trained.steps - earlier.trained.steps - (traced.steps - traced_before.steps),
            training - reading,
            examples.since(earlier.trained.examples.without(traced_before.examples)),
            spent["input"] - reading,
        )


def mark() -> Mark:
    """Now."""
    return Mark(time.perf_counter(), breakdown.seconds(), counter.trained, counter.traced)


def of_epoch(record: Mapping[str, Any]) -> Figures:
    """The steps of an epoch, from its entry in a `time_report` or in `events.jsonl`."""
    steady, parts = record.get("steady"), record["parts"]
    if steady is None:  # written by an earlier version
        seconds = sum(parts.get(part, 0.0) for part in TRAINING)
        return Figures(record["steps"], seconds, record["examples"], parts.get("input", 0.0))
    return Figures(steady["steps"], steady["seconds"], steady["examples"], steady["waiting"])


def of_run(epochs: Iterable[Figures]) -> Figures:
    """The steps of all epochs but the first that has any, or of that if it is alone.

    The first also starts the input and finds out how many steps to make at a time.
    """
    found = [each for each in epochs if each.steps > 0]
    found = found[1:] or found
    examples = [each.examples for each in found if each.examples is not None]
    return Figures(
        sum(each.steps for each in found),
        sum(each.seconds for each in found),
        sum(examples) if len(examples) == len(found) else None,
        sum(each.waiting for each in found),
    )


def of_report(epochs: Sequence[Mapping[str, Any]]) -> float:
    """Examples a second of a `time_report`, as `of_run` counts them; NaN where they were not counted.

    Of a run in which something was traced for every step, it is the rate with that.
    """
    counted = [each for each in epochs if each["examples"] is not None]
    rate = of_run(map(of_epoch, counted)).examples_per_second
    if rate is not None:
        return rate
    seconds = sum(each["parts"][part] for each in counted for part in (*TRAINING, "start"))
    return sum(each["examples"] for each in counted) / seconds if seconds > 0 else float("nan")
