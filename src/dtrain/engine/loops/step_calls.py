"""One call of a train, test or predict function: what it reads, and how many of its planned steps ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Call:
    """One call of a train, test or predict function, which gets this object as its iterator over batches.

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

    def last_step(self, planned: int) -> int:
        """The number of this call's last step, for the callbacks after it; `planned` is the planned one."""
        return planned if self.steps == 1 else LastStep(planned, lambda: planned - self.unmade)

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class GroupCall(Call):
    """One call of a predict function for several batches, which the function reads by itself."""

    def __next__(self) -> GroupCall:
        return self


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as the plain number, as a callback's state in a checkpoint."""
        return int, (int(self),)
