"""Counts the steps and examples that this process has trained on, and the seconds of the steps by kind.

It listens to the engine's events. It computes no rate; `training_rate` does.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from dtrain import events
from dtrain.time_breakdown import TimeBreakdown, breakdown


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


class Examples(NamedTuple):
    """The number of examples in the job's training steps since this process started.

    Attributes:
        counted: the number of examples, over all workers.
        unsaid: the number of reports without a known number of examples.
    """

    counted: int = 0
    unsaid: int = 0

    def since(self, earlier: Examples) -> int | None:
        """The number of examples since an earlier count; None if a report since then did not know it."""
        return self.counted - earlier.counted if self.unsaid == earlier.unsaid else None

    def more(self, examples: int | None) -> Examples:
        """This count plus the examples of one more report; None or a negative number if unknown."""
        if examples is None or examples < 0:
            return Examples(self.counted, self.unsaid + 1)
        return Examples(self.counted + examples, self.unsaid)

    def without(self, others: Examples) -> Examples:
        """This count minus another one."""
        return Examples(self.counted - others.counted, self.unsaid - others.unsaid)


class Counts(NamedTuple):
    """Training steps so far.

    Attributes:
        steps: the number of steps.
        examples: the examples in them.
        reading: the seconds until their batches were read; 0 if it is not counted.
    """

    steps: int = 0
    examples: Examples = Examples()
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
