"""Divides the wall time of the training thread into parts; every moment belongs to exactly one part.

It listens to the engine's events. With the other listeners of a process, the four events of a call of the
train function take about ten microseconds. It only measures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from dtrain import events

PARTS = (
    "input",
    "compute",
    "communication",
    "checkpoint",
    "callbacks",
    "validation",
    "start",
    "other",
)
"""The parts.

`input`: waiting for batches. `compute`: the steps themselves. `communication`: communication with other
replicas, including waiting for them. `checkpoint`: the time for which saving blocks training. `callbacks`:
other callbacks, and Keras' loop. `validation`: the evaluations of `fit`. `start`: building, tracing and
compiling. `other`: outside of `fit`.
"""


class TimeBreakdown:
    """The seconds of the training thread by part. Other threads may read it; their own time is not counted.

    Attributes:
        doing: the part that began last, even if its time counts for an enclosing part.
        reading: the seconds until the batches of the newest steps were read.
    """

    def __init__(self) -> None:
        self.doing = "other"
        self.reading = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._before_steps = dict(self._seconds)  # `_seconds` when the newest steps began, or when they ended
        self._named: dict[str, float] = {}
        self._parts_of_names: dict[str, str] = {}
        self._part = "other"
        self._since = time.perf_counter()
        self._owner = threading.get_ident()
        self._pushed: list[tuple[str, str]] = []  # `_part` and `doing` before each `push`

    def enter(self, part: str, doing: str = "") -> None:
        """Begin another part now. Inside of `push`, only `doing` changes.

        Args:
            part: one of `PARTS`.
            doing: as for `push`.
        """
        if threading.get_ident() == self._owner:
            self.doing = doing or part
            if not self._pushed:
                self._change(part)

    def push(self, part: str, doing: str = "") -> None:
        """Count all time until `pop` for this part, whatever begins within it.

        In nested calls, the outermost part counts.

        Args:
            part: one of `PARTS`.
            doing: the value of the attribute `doing` meanwhile, if not this part.
        """
        if threading.get_ident() == self._owner:
            self._pushed.append((self._part, self.doing))
            self.doing = doing or part
            if len(self._pushed) == 1:
                self._change(part)

    def pop(self) -> None:
        """End the last `push`."""
        if self._pushed and threading.get_ident() == self._owner:
            part, self.doing = self._pushed.pop()
            if not self._pushed:
                self._change(part)

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
        self._change(self._part)  # also count the running part up to now
        most = max(0.0, self._seconds[source] - since[source])
        moved = most if seconds is None else min(max(seconds, 0.0), most)
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def seconds(self) -> dict[str, float]:
        """The seconds by part, up to now."""
        part, since = self._part, self._since
        found = dict(self._seconds)
        found[part] += time.perf_counter() - since
        return found

    def named(self) -> dict[str, float]:
        """The seconds by name, of the parts with a name that have ended."""
        return dict(self._named)

    def part_of(self, name: str) -> str:
        """The part that a name's seconds belong to; "" for an unknown name."""
        return self._parts_of_names.get(name, "")

    def _change(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def _handle_loop_begins(self, event: events.LoopBegins) -> None:
        fit = event.kind == "fit"
        doing = "callbacks" if fit else "validation"
        if event.outer:
            self.push("validation", doing)
        else:  # from now on, this thread is the training thread
            self._owner = threading.get_ident()
            self._pushed.clear()
            self.enter("start" if fit else "other", doing)

    def _handle_loop_ends(self, event: events.LoopEnds) -> None:
        if event.outer:
            self.pop()
        else:
            self.enter("other")

    def _handle_input_begins(self, event: events.InputBegins) -> None:
        self.enter("input")
        self._before_steps = dict(self._seconds)

    def _handle_step_begins(self, _: events.StepBegins) -> None:
        self.enter("compute")

    def _handle_steps_end(self, event: events.StepsEnd) -> None:
        waiting = event.communication if event.communication is not None else event.waiting or 0.0
        self.enter("compute")
        if event.inside:
            self.move("compute", "input", event.inside, since=self._before_steps)
        self._communicated(waiting, usual=event.usual)
        self.reading = self._seconds["input"] - self._before_steps["input"]
        self._before_steps = dict(self._seconds)

    def _handle_call_ends(self, event: events.CallEnds) -> None:
        self.enter("callbacks")
        self._communicated(event.communication, usual=event.usual)

    def _communicated(self, seconds: float, *, usual: bool) -> None:
        """Move the part of the newest steps that was not computing from `compute` to its own part.

        If the steps were traced or compiled, all their time except reading moves to `start`; so does their
        communication, because other workers were tracing as well.
        """
        if not usual:
            self.move("compute", "start", since=self._before_steps)
            self.move("communication", "start", since=self._before_steps)
        elif seconds:
            self.move("compute", "communication", seconds, since=self._before_steps)

    def _handle_part_changes(self, event: events.PartChanges) -> None:
        self.enter(event.part)

    def _handle_part_begins(self, event: events.PartBegins) -> None:
        self.push(event.part, event.doing)

    def _handle_part_ends(self, event: events.PartEnds) -> None:
        self.pop()
        if event.name and threading.get_ident() == self._owner:
            self._named[event.name] = self._named.get(event.name, 0.0) + event.seconds
            self._parts_of_names[event.name] = event.part


breakdown = TimeBreakdown()
"""The time breakdown of this process."""

events.listen_always(breakdown)
