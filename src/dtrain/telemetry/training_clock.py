"""The clock of training: which part of the wall time is this, how long do steps take, and is a worker slow?

All times that dtrain reports are measured here, at the engine's events. Rates are computed from them in
`training_rate`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from dtrain.base.clock import REAL, Clock
from dtrain.telemetry import events
from dtrain.telemetry.events import PARTS
from dtrain.telemetry.training_rate import TRAINING, Counts, Figures

SLOW = 3.0
"""A worker is slow if its own time per step is more than this many times the others'."""

_LEAST_DIFFERENCE = 0.002  # seconds per step; smaller differences are not reported
_LEAST_PART = 0.15  # a slow worker's own time is more than this fraction of the step


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
        timed: whether all of the reading is in `reading`; else some of it is in `stepping`.
    """

    steps: int = 0
    reading: float = 0.0
    stepping: float = 0.0
    waiting: float = 0.0
    together: float = 0.0
    between: float = 0.0
    measured: bool = False
    timed: bool = True

    @property
    def seconds(self) -> float:
        """The total of all kinds."""
        return self.reading + self.stepping + self.together + self.between

    def per_step(self, earlier: Totals) -> tuple[float | None, ...]:
        """The mean seconds per step since earlier totals.

        Returns:
            Four numbers: the whole step, the part without waiting for other workers, and of that part the
            reading and the callbacks. All are None without further steps; the last three are None if waiting
            was not measured, and the reading is None if it was not.
        """
        steps = self.steps - earlier.steps
        if steps <= 0:
            return (None,) * 4
        per_step = (self.seconds - earlier.seconds) / steps
        if not self.measured:
            return per_step, None, None, None
        others = self.together - earlier.together + self.waiting - earlier.waiting
        reading, between = self.reading - earlier.reading, self.between - earlier.between
        read = reading / steps if self.timed else None
        return per_step, max(0.0, per_step - others / steps), read, between / steps


class Mark(NamedTuple):
    """What the clock shows at one moment.

    Attributes:
        at: the time in seconds, by the clock's `now`.
        parts: the seconds so far, by part (`events.PARTS`).
        named: the seconds so far, by name, of the parts with a name that have ended.
        totals: the seconds of the usual training steps.
        trained: all training steps so far.
        traced: the steps of `trained` that were traced or compiled.
    """

    at: float
    parts: dict[str, float]
    named: dict[str, float]
    totals: Totals
    trained: Counts
    traced: Counts

    def since(self, earlier: Mark, *, start: bool = False) -> Figures:
        """The steps between an earlier mark and this one.

        Args:
            earlier: the earlier mark.
            start: whether traced and compiled steps count as well, with the time that this took.
        """
        traced = Counts() if start else self.traced.without(earlier.traced)
        trained = self.trained.without(earlier.trained).without(traced)
        spent = {part: seconds - earlier.parts[part] for part, seconds in self.parts.items()}
        training = sum(spent[part] for part in TRAINING) + (spent["start"] if start else 0.0)
        return Figures(
            trained.steps,
            training - traced.reading,
            trained.known_examples,
            None if trained.untimed else spent["input"] - traced.reading,
        )


class TrainingClock:
    """Measures the training thread. Every moment of it belongs to exactly one part.

    Other threads may read the clock; their own time is not counted.

    Args:
        clock: tells the time.

    Attributes:
        doing: the part that began last, even if its time counts for an enclosing part.
        totals: the seconds of the usual training steps.
        trained: all training steps of this process, except those of an inner `fit` that has ended.
        traced: the steps of `trained` that were traced or compiled, whose times are not typical. Their time
            counts as `start`, except their reading.
        waiting: the seconds of `communication` that this process waited for other workers, where measured.
        resumed: the event of the running `fit`, or of the last one, if it has resumed; else None.
    """

    def __init__(self, clock: Clock = REAL) -> None:
        self.now = clock.now
        self.doing = "other"
        self.totals = Totals()
        self.trained = self.traced = Counts()
        self.waiting = 0.0
        self.resumed: events.TrainingResumes | None = None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part = "other"
        self._since = self.now()
        self._owner = threading.get_ident()
        self._pushed: list[tuple[str, str, float]] = []  # `_part`, `doing` and the time at each
        self._named: dict[str, float] = {}
        self._parts_of_names: dict[str, str] = {}
        self._outer: list[tuple[Counts, Counts]] = []  # `trained` and `traced` when each running loop began
        # Of the newest steps:
        self._before = dict(self._seconds)  # `_seconds` when they began, or when they ended
        self._source: object = None  # where they were read; another source means a pause between steps
        self._begun = self._ended = 0.0
        self._reading = self._between = 0.0
        self._waited = 0.0  # seconds of waiting for other workers since they ended

    def enter(self, part: str, doing: str = "") -> float:
        """Begin another part now, and return the time. Inside of `push`, only `doing` changes.

        Args:
            part: one of `events.PARTS`.
            doing: as for `push`.
        """
        now = self.now()
        if threading.get_ident() == self._owner:
            self.doing = doing or part
            if not self._pushed:
                self._change(part, now)
        return now

    def push(self, part: str, doing: str = "") -> None:
        """Count all time until `pop` for this part, whatever begins within it.

        In nested calls, the outermost part counts.

        Args:
            part: one of `events.PARTS`.
            doing: the value of the attribute `doing` meanwhile, if not this part.
        """
        if threading.get_ident() == self._owner:
            now = self.now()
            self._pushed.append((self._part, self.doing, now))
            self.doing = doing or part
            if len(self._pushed) == 1:
                self._change(part, now)

    def pop(self) -> float:
        """End the last `push`, and return the seconds since then; 0.0 in another thread."""
        if not self._pushed or threading.get_ident() != self._owner:
            return 0.0
        now = self.now()
        part, self.doing, begun = self._pushed.pop()
        if not self._pushed:
            self._change(part, now)
        return now - begun

    def move(
        self, source: str, target: str, seconds: float | None = None, *, since: Mapping[str, float]
    ) -> None:
        """Move seconds that were counted for one part to another part. No effect inside of `push`.

        Args:
            source: the part that they were counted for.
            target: the part that they belong to.
            seconds: the number of seconds; None moves all since `since`.
            since: the result of `seconds()` at an earlier time. At most the seconds that were counted since
                then are moved, so that no interval becomes negative.
        """
        if self._pushed or threading.get_ident() != self._owner:
            return
        self._change(self._part, self.now())  # also count the running part up to now
        most = max(0.0, self._seconds[source] - since[source])
        moved = most if seconds is None else min(max(seconds, 0.0), most)
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def seconds(self) -> dict[str, float]:
        """The seconds by part, up to now."""
        part, since = self._part, self._since
        seconds = dict(self._seconds)
        seconds[part] += self.now() - since
        return seconds

    def part_of(self, name: str) -> str:
        """The part that a name's seconds belong to; "" for an unknown name."""
        return self._parts_of_names.get(name, "")

    def mark(self) -> Mark:
        """A mark of the present moment."""
        seconds = self.seconds()
        return Mark(self.now(), seconds, dict(self._named), self.totals, self.trained, self.traced)

    def _change(self, part: str, now: float) -> None:
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def _handle_loop_begins(self, event: events.LoopBegins) -> None:
        self._outer.append((self.trained, self.traced))
        self._source = None
        fit = event.kind == "fit"
        doing = "callbacks" if fit else "validation"
        if event.outer:
            self.push("validation", doing)
        else:  # from now on, this thread is the training thread
            self._owner = threading.get_ident()
            self._pushed.clear()
            self.enter("start" if fit else "other", doing)
            self.resumed = None if fit else self.resumed

    def _handle_training_resumes(self, event: events.TrainingResumes) -> None:
        self.resumed = event

    def _handle_loop_ends(self, event: events.LoopEnds) -> None:
        before = self._outer.pop()
        self._source = None
        if event.outer:
            self.trained, self.traced = before  # the steps of an inner loop do not count for the outer one
            self.pop()
        else:
            self.enter("other")

    def _handle_input_begins(self, event: events.InputBegins) -> None:
        now = self.enter("input")
        if event.source is not self._source:
            self._waited, self._ended = 0.0, now
        self._between = now - self._ended - self._waited
        self._source, self._begun = event.source, now
        self._before = dict(self._seconds)

    def _handle_step_begins(self, _: events.StepBegins) -> None:
        now = self.enter("compute")
        self._reading, self._begun = now - self._begun, now

    def _handle_steps_end(self, event: events.StepsEnd) -> None:
        now = self.enter("compute")
        inside = event.inside or 0.0
        if inside:
            self.move("compute", "input", inside, since=self._before)
        waiting = event.waiting or 0.0
        self.waiting += waiting if event.usual and not self._pushed else 0.0
        self._communicated(waiting if event.communication is None else event.communication, usual=event.usual)
        if event.train:
            self.trained = self.trained.more(event.steps, event.examples, event.inside)
            if event.usual:
                old = self.totals
                self.totals = Totals(
                    old.steps + event.steps,
                    old.reading + self._reading + inside,
                    old.stepping + now - self._begun - inside,
                    old.waiting + waiting,
                    old.together + self._waited,
                    old.between + self._between,
                    event.waiting is not None,
                    event.inside is not None,
                )
            else:
                reading = self._seconds["input"] - self._before["input"]
                self.traced = self.traced.more(event.steps, event.examples, reading)
        self._ended = now
        self._between = self._waited = 0.0
        self._before = dict(self._seconds)

    def _handle_call_ends(self, event: events.CallEnds) -> None:
        now = self.enter("callbacks")
        self._communicated(event.communication, usual=event.usual)
        if event.train and event.usual:
            self.totals = self.totals._replace(together=self.totals.together + now - self._ended)
        self._ended = now

    def _communicated(self, seconds: float, *, usual: bool) -> None:
        """Move the part of the newest steps that was not computing from `compute` to its own part.

        If the steps were traced or compiled, all their time except reading moves to `start`; so does their
        communication, because other workers were tracing as well.
        """
        if not usual:
            self.move("compute", "start", since=self._before)
            self.move("communication", "start", since=self._before)
        elif seconds:
            self.move("compute", "communication", seconds, since=self._before)

    def _handle_batches_taken(self, event: events.BatchesTaken) -> None:
        self.trained = self.trained.more(event.steps, event.examples)

    def _handle_part_changes(self, event: events.PartChanges) -> None:
        self.enter(event.part)

    def _handle_part_begins(self, event: events.PartBegins) -> None:
        self.push(event.part, event.doing)

    def _handle_part_ends(self, event: events.PartEnds) -> None:
        seconds = self.pop()
        if event.part == "communication":
            self._waited += seconds
            self.waiting += 0.0 if self._pushed else seconds
        if event.name and threading.get_ident() == self._owner:
            self._named[event.name] = self._named.get(event.name, 0.0) + seconds
            self._parts_of_names[event.name] = event.part


def is_slow(mine: float, usual: float, step: float) -> bool:
    """Whether a worker is so slow that the others wait for it.

    Args:
        mine: the worker's own seconds per step, without waiting for other workers.
        usual: the median of the other workers' own seconds per step.
        step: the seconds of a whole step.
    """
    return mine > SLOW * usual and mine - usual > _LEAST_DIFFERENCE and mine > _LEAST_PART * step


def slow_line(who: str, mine: float, usual: float, *, reading: float | None, between: float) -> str:
    """The line that reports a slow worker and what it spends most of its own time on.

    Args:
        who: the worker's name.
        mine, usual: as for `is_slow`.
        reading: the part of `mine` that the worker waits for its next batch; None if it was not measured.
        between: the part of `mine` that it spends in callbacks.
    """
    parts = {
        "waiting for its next batch": reading or 0.0,
        "in callbacks": between,
        "computing" if reading is not None else "computing, or waiting for its next batch": max(
            0.0, mine - (reading or 0.0) - between
        ),
    }
    part, seconds = max(parts.items(), key=lambda item: item[1])
    times = "" if usual <= 0 else f", {mine / usual:.1f} times as long"
    return (
        f"{who} is slow, and the others wait for it: its own part of a step takes {in_words(mine)}, "
        f"that of the others {in_words(usual)}{times}; {in_words(seconds)} of it is {part}"
    )


def in_words(seconds: float) -> str:
    """A duration in seconds as text, with two significant digits below 10 s and whole seconds above."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{round(seconds, 1):g} s" if seconds >= 1 else f"{seconds:.2g} s"


clock = TrainingClock()
"""The training clock of this process."""

events.listen_always(clock)
