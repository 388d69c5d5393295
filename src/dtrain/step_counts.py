"""How many steps and examples this process has trained on, and what the usual steps took, by kind of time.

It listens to the engine's events. What follows from the numbers is for others to say.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from dtrain import events
from dtrain.time_breakdown import TimeBreakdown, breakdown


class Totals(NamedTuple):
    """Seconds spent on training steps so far, by kind. Steps for which something was traced do not count.

    Attributes:
        steps: how many.
        reading: until the next batch was there.
        stepping: in the step itself, waiting for the other workers included.
        waiting: of that, for the other workers.
        together: in computing the logs, and between steps in waiting for the other workers.
        between: the rest from one step's end to the next one's begin: callbacks.
        measured: whether waiting was measured.
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
        """All of it."""
        return self.reading + self.stepping + self.together + self.between

    def per_step(self, earlier: Totals) -> tuple[float | None, ...]:
        """Seconds a step since earlier totals: all, without waiting, of that reading, and in callbacks.

        None for what is not known.
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
    """Examples that training has seen: those that were counted, and how many steps did not say.

    They are those of the whole job's steps, in this process' life.
    """

    counted: int = 0
    unsaid: int = 0

    def since(self, earlier: Examples) -> int | None:
        """How many came since; None if a step did not say."""
        return self.counted - earlier.counted if self.unsaid == earlier.unsaid else None

    def more(self, examples: int | None) -> Examples:
        """With those of further steps; None or less than 0 where that is not known."""
        if examples is None or examples < 0:
            return Examples(self.counted, self.unsaid + 1)
        return Examples(self.counted + examples, self.unsaid)

    def without(self, others: Examples) -> Examples:
        """These, but for others."""
        return Examples(self.counted - others.counted, self.unsaid - others.unsaid)


class Counts(NamedTuple):
    """Training steps so far.

    Attributes:
        steps: how many.
        examples: that they saw.
        reading: seconds until their batches were there.
    """

    steps: int = 0
    examples: Examples = Examples()
    reading: float = 0.0

    def more(self, steps: int, examples: int | None, reading: float = 0.0) -> Counts:
        """With further steps."""
        return Counts(self.steps + steps, self.examples.more(examples), self.reading + reading)


class StepCounter:
    """Counts the steps of a process; the thread that trains writes it, others read it.

    Args:
        breakdown: listens to the same events before it.

    Attributes:
        totals: what usual steps took.
        trained: all training steps of this life, without those of a `fit` inside of another that has ended.
        traced: of them, those in whose calls something was traced or compiled: their times tell nothing of
            others. All that they took but their reading counts as `start`.
    """

    def __init__(self, breakdown: TimeBreakdown) -> None:
        self.totals = Totals()
        self.trained = self.traced = Counts()
        self._breakdown = breakdown
        self._outer: list[tuple[Counts, Counts]] = []  # what was counted when each running loop began
        self._source: Any = None  # of the last batch; another one means that a pause lies between
        self._begun = self._ended = 0.0
        self._reading = self._between = 0.0
        self._waited = 0.0  # between steps, for the other workers

    def _handle_loop_begins(self, event: events.LoopBegins) -> None:
        self._outer.append((self.trained, self.traced))
        self._source = None

    def _handle_loop_ends(self, event: events.LoopEnds) -> None:
        before = self._outer.pop()
        self._source = None
        if event.outer:  # what a `fit` inside of another did is none of the other's
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
"""That of this process."""

events.listen_always(counter)
