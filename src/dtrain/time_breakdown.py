"""Where the time of this process goes: every moment belongs to one part, so they add up to the wall time.

It listens to the engine's events and judges nothing. An event costs it well under a microsecond.
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

`input` is the time until batches were there; `compute` the steps themselves; `communication` what a step
spent on the other replicas, the waiting for them included; `checkpoint` what training stood still for;
`callbacks` all others, and Keras' loop; `validation` the evaluations of `fit`; `start` building, tracing and
compiling; `other` what lies outside of `fit`.
"""


class TimeBreakdown:
    """The seconds of the thread that trains, by part. Other threads may read it; theirs are not counted.

    Attributes:
        doing: the part that began last, also where it counts for another one that was pushed.
        reading: seconds until the batches of the newest steps were there.
    """

    def __init__(self) -> None:
        self.doing = "other"
        self.reading = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._before_steps = dict(self._seconds)  # when the newest steps, or what follows them, began
        self._named: dict[str, float] = {}
        self._parts_of_names: dict[str, str] = {}
        self._part = "other"
        self._since = time.perf_counter()
        self._owner = threading.get_ident()
        self._pushed: list[tuple[str, str]] = []  # what `_part` and `doing` were before each

    def enter(self, part: str, doing: str = "") -> None:
        """Another part begins now; `doing` as in `push`."""
        if threading.get_ident() == self._owner:
            self.doing = doing or part
            if not self._pushed:
                self._change(part)

    def push(self, part: str, doing: str = "") -> None:
        """All that follows counts for this part, whatever begins within it; until `pop`.

        Args:
            part: one of `PARTS`.
            doing: the part that is told to those who ask what goes on, if not this one.
        """
        if threading.get_ident() == self._owner:
            self._pushed.append((self._part, self.doing))
            self.doing = doing or part
            if len(self._pushed) == 1:
                self._change(part)

    def pop(self) -> None:
        """The end of what the last `push` began."""
        if self._pushed and threading.get_ident() == self._owner:
            part, self.doing = self._pushed.pop()
            if not self._pushed:
                self._change(part)

    def move(
        self, source: str, target: str, seconds: float | None = None, *, since: Mapping[str, float]
    ) -> None:
        """Says of seconds that were counted for one part that they were another's.

        Args:
            source: the part that they were counted for.
            target: the part that they belong to.
            seconds: how many; None for all.
            since: what `seconds` said at an earlier moment. No more is moved than was counted after it, so
                that no part of any time becomes negative.
        """
        if self._pushed or threading.get_ident() != self._owner:
            return
        self._change(self._part)  # what the running part has so far is counted, too
        most = max(0.0, self._seconds[source] - since[source])
        moved = most if seconds is None else min(max(seconds, 0.0), most)
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def seconds(self) -> dict[str, float]:
        """By part, until now."""
        part, since = self._part, self._since
        found = dict(self._seconds)
        found[part] += time.perf_counter() - since
        return found

    def named(self) -> dict[str, float]:
        """Seconds by name, of what has ended."""
        return dict(self._named)

    def part_of(self, name: str) -> str:
        """The part that a name's seconds belong to; "" for a name that was never noted."""
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
        else:  # from now on it is this thread's time that counts
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
        """Says which part of the newest steps was not computing.

        Of unusual ones nothing but reading was usual; nor the waiting: others traced, too.
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
"""That of this process."""

events.listen_always(breakdown)
