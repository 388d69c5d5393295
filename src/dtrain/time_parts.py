"""Where the time of this process goes: every moment belongs to one part, so they add up to the wall time.

It is told what begins; it judges nothing. Telling costs well under a microsecond.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

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


class Ledger:
    """The seconds of one thread, by part. Other threads may read it; what they tell is not taken."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._named: dict[str, float] = {}
        self._parts_of_names: dict[str, str] = {}
        self._part = "other"
        self._since = time.perf_counter()
        self._owner = threading.get_ident()
        self._pinned: list[str] = []  # the parts that stood before each of those that take all

    def take_over(self) -> None:
        """From now on it is this thread that tells."""
        self._owner = threading.get_ident()
        self._pinned.clear()

    def enter(self, part: str) -> str:
        """Something else begins now; returns what it was before."""
        before = self._part
        if self._pinned or threading.get_ident() != self._owner:
            return before
        now = time.perf_counter()
        self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

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
        if self._pinned or threading.get_ident() != self._owner:
            return
        self.enter(self._part)  # what the running part has so far is counted, too
        most = max(0.0, self._seconds[source] - since[source])
        moved = most if seconds is None else min(max(seconds, 0.0), most)
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def pin(self, part: str) -> None:
        """All that follows is of this part, whatever begins within it; until `unpin`."""
        if threading.get_ident() == self._owner:
            before = self.enter(part)
            self._pinned.append(before)

    def unpin(self) -> None:
        """The end of what the last `pin` began."""
        if self._pinned and threading.get_ident() == self._owner:
            before = self._pinned.pop()
            self.enter(before)

    @contextlib.contextmanager
    def within(self, part: str, name: str) -> Iterator[None]:
        """While it lasts, all is of this part; its seconds are kept under a name, too."""
        if threading.get_ident() != self._owner:
            yield
            return
        begun = time.perf_counter()
        self.pin(part)
        try:
            yield
        finally:
            self.unpin()
            self._named[name] = self._named.get(name, 0.0) + time.perf_counter() - begun
            self._parts_of_names[name] = part

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
