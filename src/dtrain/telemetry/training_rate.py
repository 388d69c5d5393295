"""Computes from measured times how fast training is.

All rates that dtrain reports come from here. Only training steps count, including their waiting times;
validation, callbacks, and steps that were traced or compiled do not. `training_clock` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

NAME = "examples_per_second"
"""The name of the training rate in logs and files."""

TRAINING = ("input", "compute", "communication")
"""The parts of the time (`events.PARTS`) that belong to training steps."""


class Counts(NamedTuple):
    """A number of training steps.

    Attributes:
        steps: the number of steps.
        examples: the number of examples in them, over all workers, as far as it is known.
        unsaid: the number of reports without a known number of examples.
        reading: the seconds until their batches were read; 0 if it is not counted.
        untimed: the number of reports of steps that read batches for an unknown time.
    """

    steps: int = 0
    examples: int = 0
    unsaid: int = 0
    reading: float = 0.0
    untimed: int = 0

    @property
    def known_examples(self) -> int | None:
        """The number of examples; None if a report did not know it."""
        return None if self.unsaid else self.examples

    def more(self, steps: int, examples: int | None, reading: float | None = 0.0) -> Counts:
        """These steps and further ones.

        Args:
            steps: the number of further steps.
            examples: the examples in them; None or a negative number if unknown.
            reading: the seconds until their batches were read; None if unknown.
        """
        said = examples is not None and examples >= 0
        return Counts(
            self.steps + steps,
            self.examples + (examples or 0 if said else 0),
            self.unsaid + (not said),
            self.reading + (reading or 0.0),
            self.untimed + (reading is None),
        )

    def without(self, others: Counts) -> Counts:
        """These steps without others that are a part of them."""
        return Counts(
            self.steps - others.steps,
            self.examples - others.examples,
            self.unsaid - others.unsaid,
            self.reading - others.reading,
            self.untimed - others.untimed,
        )


class Figures(NamedTuple):
    """The duration and size of a number of steps.

    Attributes:
        steps: the number of steps.
        seconds: the seconds that they took.
        examples: the number of examples in them; None if unknown.
        waiting: the part of `seconds` that they waited for batches; None if not measured.
    """

    steps: int
    seconds: float
    examples: int | None
    waiting: float | None

    def rounded(self) -> dict[str, Any]:
        """The figures by name, to the microsecond."""
        waiting = None if self.waiting is None else round(self.waiting, 6)
        return self._replace(seconds=round(self.seconds, 6), waiting=waiting)._asdict()

    @property
    def step_seconds(self) -> float | None:
        """The mean seconds per step; None without steps."""
        return self.seconds / self.steps if self.steps > 0 else None

    @property
    def examples_per_second(self) -> float | None:
        """The examples per second; None if the number of examples is unknown, or without steps."""
        known = self.examples is not None and self.steps > 0 and self.seconds > 0
        return self.examples / self.seconds if known and self.examples is not None else None

    @property
    def data_wait(self) -> float | None:
        """The fraction of the time in which training waited for data, 0.0 to 1.0; None if it is unknown."""
        return self.waiting / self.seconds if self.seconds > 0 and self.waiting is not None else None


def of_epoch(record: Mapping[str, Any]) -> Figures:
    """The steps of an epoch, from its entry in `History.time_report` or in `events.jsonl`."""
    steady, parts = record.get("steady"), record["parts"]
    if steady is None:  # written by an earlier version
        seconds = sum(parts.get(part, 0.0) for part in TRAINING)
        return Figures(record["steps"], seconds, record["examples"], parts.get("input", 0.0))
    return Figures(steady["steps"], steady["seconds"], steady["examples"], steady["waiting"])


def of_run(epochs: Iterable[Figures]) -> Figures:
    """The steps of all epochs with steps, except the first; if there is only one, the steps of that one.

    The first is left out because it also starts the input and tunes the number of steps per call.
    """
    counted = [epoch for epoch in epochs if epoch.steps > 0]
    counted = counted[1:] or counted
    examples = [epoch.examples for epoch in counted if epoch.examples is not None]
    waiting = [epoch.waiting for epoch in counted if epoch.waiting is not None]
    return Figures(
        sum(epoch.steps for epoch in counted),
        sum(epoch.seconds for epoch in counted),
        sum(examples) if len(examples) == len(counted) else None,
        sum(waiting) if len(waiting) == len(counted) else None,
    )


def of_report(epochs: Sequence[Mapping[str, Any]]) -> float:
    """The examples per second of a `History.time_report`, over the steps that `of_run` selects.

    If all steps of the run were traced or compiled, the rate includes the time of tracing and compiling. NaN
    if the number of examples is unknown.
    """
    counted = [epoch for epoch in epochs if epoch["examples"] is not None]
    rate = of_run(map(of_epoch, counted)).examples_per_second
    if rate is not None:
        return rate
    seconds = sum(epoch["parts"][part] for epoch in counted for part in (*TRAINING, "start"))
    return sum(epoch["examples"] for epoch in counted) / seconds if seconds > 0 else float("nan")
