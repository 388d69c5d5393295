"""How many steps a call of the train or test function makes, and who wants to see each of them.

Many steps a call keep Python out of the way; few let callbacks and the progress bar act in time. Numbers do
not depend on it: the same program runs whatever the number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange

TARGET_SECONDS = 0.1
"""How long a call should take: twice as long is the most that callbacks should have to wait."""

_GROWTH = 8  # times as many steps as in the call before, at most
_MOST = 4096
_MEETING = 8  # calls between two meetings of the workers, which agree on the number
_FIRST_MEETINGS = 8  # calls at each of which they meet, while the number grows


class Call:
    """One call of a train or test function.

    Attributes:
        steps: how many it is to make.
        ran: how many it made, once it has: less where the data ended.
        seconds: what they took, if that says what later ones will take.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ran: int | None = None
        self.seconds: float | None = None

    @property
    def unmade(self) -> int:
        """Steps that it was to make and did not, the data having ended."""
        return 0 if self.ran is None else self.steps - self.ran


class LastStep(int):
    """The number of a call's last step, given to callbacks before the call and read by them after it.

    It is the planned one; where the data ended before, what is computed from it is right all the same.
    """

    call: Call

    def __new__(cls, step: int, call: Call) -> LastStep:  # noqa: D102
        made = super().__new__(cls, step)
        made.call = call
        return made

    def __add__(self, other: int) -> int:
        return int(self) - self.call.unmade + other


class Blocks:
    """Finds the number of steps for the calls of one epoch iterator.

    Args:
        layout: how the replicas are spread; all workers must ask for each call alike.
        every_batch: whether each call is one step, because somebody looks at each batch.
    """

    def __init__(self, layout: ReplicaLayout, *, every_batch: bool) -> None:
        self.every_batch = every_batch
        self._layout = layout
        self._size = 1
        self._proposed = 1
        self._calls = 0

    def steps(self) -> int:
        """How many steps the next call may make. All workers must call it, equally often."""
        if self.every_batch:
            return 1
        self._calls += 1
        if self._layout.workers == 1:
            self._size = self._proposed
        elif self._calls > 1 and (self._calls <= _FIRST_MEETINGS or self._calls % _MEETING == 0):
            # The slowest counts: a call is over when all have made its steps.
            self._size = min(exchange(self._layout, self._proposed))
        return self._size

    def note(self, call: Call) -> None:
        """Learns from a call that was made."""
        if self.every_batch or not call.ran or call.seconds is None:
            return
        fitting = int(TARGET_SECONDS * call.ran / max(call.seconds, 1e-6))
        self._proposed = max(1, min(fitting, _GROWTH * call.ran, _MOST))


@dataclass(frozen=True)
class Plan:
    """What a `fit` is to do.

    Attributes:
        model: which it trains.
        epochs: how many.
    """

    model: Any
    epochs: int


@dataclass
class _Wish:
    every_batch: list[bool]
    plan: Plan | None


_wishes: list[_Wish] = []


@contextlib.contextmanager
def watched_by(*every_batch: bool, plan: Plan | None = None) -> Iterator[None]:
    """Epoch iterators that are made within it make calls of one step where somebody looks at each batch.

    Args:
        every_batch: whether somebody does, for the first iterator that is made, the second, and so on; the
            last holds for all that follow.
        plan: what the first iterator is for, if that is a `fit`.
    """
    _wishes.append(_Wish(list(every_batch), plan))
    try:
        yield
    finally:
        _wishes.pop()


def every_batch_wished() -> bool:
    """Whether the epoch iterator that is being made is to make calls of one step; so if nobody says."""
    if not _wishes:
        return True
    each = _wishes[-1].every_batch
    return each.pop(0) if len(each) > 1 else each[0]


def plan_wished() -> Plan | None:
    """The plan of the `fit` that the epoch iterator which is being made is the first of."""
    if not _wishes:
        return None
    plan, _wishes[-1].plan = _wishes[-1].plan, None
    return plan
