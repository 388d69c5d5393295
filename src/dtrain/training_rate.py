"""Counts training steps, their examples and their seconds, and computes the training rate from the counts.

All rates and step times that dtrain reports come from here. Only training steps count, including their
waiting times; validation, callbacks, and steps that were traced or compiled do not. The counter listens to
the engine's events. How the wall time is divided into parts is measured in `time_breakdown`, not here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dtrain import events
from dtrain.time_breakdown import TimeBreakdown, breakdown

NAME = "examples_per_second"
"""The name of the training rate in logs and files."""

TRAINING = ("input", "compute", "communication")
"""The parts of the time breakdown that belong to training steps."""


class Totals(NamedTuple):
    """The seconds spent on training steps so far, by kind; steps that were traced or compiled do not count.

    Attributes:
        steps: the number of steps.
        reading: the seconds until the next batch was read.
        stepping: the seconds in the steps themselves, including the time they waited for other workers.
        waiting: the part of `stepping` that the steps waited for other workers.
        together: the seconds of computing the logs, and of waiting for other workers between steps.
        between: the other seconds between two steps, which callbacks take.
        measured: whether `waiting` was measured.
    """

    steps: int = 0
    reading: float = 0.0
    stepping: float = 0.0
    waiting: float = 0.0
    together: float = 0.0
    between: float = 0.0
    measured: bool = False

    @property
    def seconds(self) -> float:
        """The total of all kinds."""
        return self.reading + self.stepping + self.together + self.between

    def per_step(self, earlier: Totals) -> tuple[float | None, ...]:
        """The mean seconds per step since earlier totals.

        Returns:
            Four numbers: the whole step, the part without waiting for other workers, and of that part the
            reading and the callbacks. All are None without further steps; the last three are None if waiting
            was not measured.
        """
        steps = self.steps - earlier.steps
        if steps <= 0:
            return (None,) * 4
        each = (self.seconds - earlier.seconds) / steps
        if not self.measured:
            return each, None, None, None
        others = self.together - earlier.together + self.waiting - earlier.waiting
        reading, between = self.reading - earlier.reading, self.between - earlier.between
        return each, max(0.0, each - others / steps), reading / steps, between / steps


class ExampleCount(NamedTuple):
    """The number of examples in the job's training steps since this process started.

    Attributes:
        counted: the number of examples, over all workers.
        unsaid: the number of reports without a known number of examples.
    """

    counted: int = 0
    unsaid: int = 0

    def since(self, earlier: ExampleCount) -> int | None:
        """The number of examples since an earlier count; None if a report since then did not know it."""
        return self.counted - earlier.counted if self.unsaid == earlier.unsaid else None

    def more(self, examples: int | None) -> ExampleCount:
        """This count plus the examples of one more report; None or a negative number if unknown."""
        if examples is None or examples < 0:
            return ExampleCount(self.counted, self.unsaid + 1)
        return ExampleCount(self.counted + examples, self.unsaid)

    def without(self, others: ExampleCount) -> ExampleCount:
        """This count minus another one."""
        return ExampleCount(self.counted - others.counted, self.unsaid - others.unsaid)


class Counts(NamedTuple):
    """Training steps so far.

    Attributes:
        steps: the number of steps.
        examples: the examples in them.
        reading: the seconds until their batches were read; 0 if it is not counted.
    """

    steps: int = 0
    examples: ExampleCount = ExampleCount()
    reading: float = 0.0

    def more(self, steps: int, examples: int | None, reading: float = 0.0) -> Counts:
        """This count plus further steps."""
        return Counts(self.steps + steps, self.examples.more(examples), self.reading + reading)


class StepCounter:
    """Counts the steps of this process; the training thread writes it, and other threads may read it.

    Args:
        breakdown: the time breakdown; it must listen to the same events before this object.

    Attributes:
        totals: the seconds of the usual training steps.
        trained: all training steps of this process, except those of an inner `fit` that has ended.
        traced: the part of `trained` that was traced or compiled, whose times are not typical. The time
            breakdown counts these steps as `start`, except their reading.
    """

    def __init__(self, breakdown: TimeBreakdown) -> None:
        self.totals = Totals()
        self.trained = self.traced = Counts()
        self._breakdown = breakdown
        self._outer: list[tuple[Counts, Counts]] = []  # `trained` and `traced` when each running loop began
        self._source: Any = None  # the source of the last batch; another source means a pause between steps
        self._begun = self._ended = 0.0
        self._reading = self._between = 0.0
        self._waited = 0.0  # seconds of waiting for other workers since the last step

    def _handle_loop_begins(self, event: events.LoopBegins) -> None:
        self._outer.append((self.trained, self.traced))
        self._source = None

    def _handle_loop_ends(self, event: events.LoopEnds) -> None:
        before = self._outer.pop()
        self._source = None
        if event.outer:  # the steps of an inner loop do not count for the outer one
            self.trained, self.traced = before

    def _handle_input_begins(self, event: events.InputBegins) -> None:
        now = time.perf_counter()
        if event.source is not self._source:
            self._waited, self._ended = 0.0, now
        self._between = now - self._ended - self._waited
        self._source, self._begun = event.source, now

    def _handle_step_begins(self, event: events.StepBegins) -> None:
        now = time.perf_counter()
        self._reading, self._begun = now - self._begun, now

    def _handle_steps_end(self, event: events.StepsEnd) -> None:
        now = time.perf_counter()
        if event.train:
            self.trained = self.trained.more(event.steps, event.examples)
            if event.usual:
                old = self.totals
                self.totals = Totals(
                    old.steps + event.steps,
                    old.reading + self._reading + event.inside,
                    old.stepping + now - self._begun - event.inside,
                    old.waiting + (event.waiting or 0.0),
                    old.together + self._waited,
                    old.between + self._between,
                    event.waiting is not None,
                )
            else:
                self.traced = self.traced.more(event.steps, event.examples, self._breakdown.reading)
        self._ended = now
        self._between = self._waited = 0.0

    def _handle_call_ends(self, event: events.CallEnds) -> None:
        now = time.perf_counter()
        if event.train and event.usual:
            self.totals = self.totals._replace(together=self.totals.together + now - self._ended)
        self._ended = now

    def _handle_batches_taken(self, event: events.BatchesTaken) -> None:
        self.trained = self.trained.more(event.steps, event.examples)

    def _handle_part_ends(self, event: events.PartEnds) -> None:
        if event.part == "communication":
            self._waited += event.seconds


counter = StepCounter(breakdown)
"""The step counter of this process."""

events.listen_always(counter)


class Figures(NamedTuple):
    """The duration and size of a number of steps.

    Attributes:
        steps: the number of steps.
        seconds: the seconds that they took.
        examples: the number of examples in them; None if unknown.
        waiting: the part of `seconds` that they waited for batches.
    """

    steps: int
    seconds: float
    examples: int | None
    waiting: float

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
        """The fraction of the time in which training waited for data, 0.0 to 1.0; None without steps."""
        return self.waiting / self.seconds if self.seconds > 0 else None


class Mark(NamedTuple):
    """A snapshot of this process's training counters.

    Attributes:
        at: the time, by `time.perf_counter`.
        parts: the seconds so far, by part of the time breakdown.
        trained: all training steps so far.
        traced: the part of them that was traced or compiled.
    """

    at: float
    parts: dict[str, float]
    trained: Counts
    traced: Counts

    def since(self, earlier: Mark, *, start: bool = False) -> Figures:
        """The steps between an earlier mark and this one.

        Args:
            earlier: the earlier mark.
            start: whether traced and compiled steps count as well, with the time that this took.
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
    """A mark of the present moment."""
    return Mark(time.perf_counter(), breakdown.seconds(), counter.trained, counter.traced)


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
    """The examples per second of a `History.time_report`, over the steps that `of_run` selects.

    If all steps of the run were traced or compiled, the rate includes the time of tracing and compiling. NaN
    if the number of examples is unknown.
    """
    counted = [each for each in epochs if each["examples"] is not None]
    rate = of_run(map(of_epoch, counted)).examples_per_second
    if rate is not None:
        return rate
    seconds = sum(each["parts"][part] for each in counted for part in (*TRAINING, "start"))
    return sum(each["examples"] for each in counted) / seconds if seconds > 0 else float("nan")
