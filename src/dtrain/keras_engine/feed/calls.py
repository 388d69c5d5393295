"""Decides how many steps a call of the train or test function runs.

With more steps per call, Python costs less per step; with fewer, callbacks and the progress bar are called in
time. The results do not depend on the number, because the same program runs. How steps run is not decided
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrain.keras_engine.peer_exchange import exchange
from dtrain.keras_engine.protocol import ReplicaLayout

TARGET_SECONDS = 0.1
"""The intended duration of a call; callbacks should wait for at most twice as long."""

_GROWTH = 8  # the most by which the number of steps is multiplied from one call to the next
_MOST = 4096  # the most steps of a call
_MEETING = 8  # at every eighth call, the workers exchange and agree on the number
_FIRST_MEETINGS = 8  # up to this call, they do so at every call but the first, while the number grows


class Call:
    """One call of a train or test function, which gets this object as its iterator over batches.

    Args:
        iterator: the iterator to read batches from.
        steps: the number of planned steps.

    Attributes:
        iterator, steps: as given.
        ran: the steps that ran, fewer than planned if the data ended; None before the call.
        seconds: the time of those steps; None if it is not typical, because something was traced.
    """

    def __init__(self, iterator: Any, steps: int) -> None:
        self.iterator = iterator
        self.steps = steps
        self.ran: int | None = None
        self.seconds: float | None = None

    @property
    def unmade(self) -> int:
        """The planned steps that did not run because the data ended."""
        return 0 if self.ran is None else self.steps - self.ran

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class LastStep(int):
    """The number of a call's step that Keras passes to callbacks after the call.

    As an int it is the number that Keras expects. Adding to it uses the step that really was the last, also
    if the data ended earlier, so `batch + 1` is the number of steps that ran.
    """

    last: Callable[[], int]

    def __new__(cls, step: int, last: Callable[[], int]) -> LastStep:  # noqa: D102
        made = super().__new__(cls, step)
        made.last = last
        return made

    def __add__(self, other: int) -> int:
        return self.last() + other


class CallSize:
    """Chooses the number of steps for the calls of one iterator of epochs.

    Args:
        layout: how the replicas are distributed.
        every_batch: whether each call is one step, because a callback needs each batch.
    """

    def __init__(self, layout: ReplicaLayout, *, every_batch: bool) -> None:
        self.every_batch = every_batch
        self._layout = layout
        self._size = 1
        self._proposed = 1
        self._calls = 0

    def steps(self) -> int:
        """The most steps of the next call. All workers must call it, equally often."""
        if self.every_batch:
            return 1
        self._calls += 1
        if self._layout.workers == 1:
            self._size = self._proposed
        elif self._calls > 1 and (self._calls <= _FIRST_MEETINGS or self._calls % _MEETING == 0):
            # The slowest worker decides, because a call ends when all workers have run its steps.
            self._size = min(exchange(self._layout, self._proposed))
        return self._size

    def note(self, call: Call) -> None:
        """Adjusts the number of steps to the time that a call took."""
        if self.every_batch or not call.ran or call.seconds is None:
            return
        fitting = int(TARGET_SECONDS * call.ran / max(call.seconds, 1e-6))
        self._proposed = max(1, min(fitting, _GROWTH * call.ran, _MOST))
