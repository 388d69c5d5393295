"""How many steps a call of the train or test function makes.

Many steps a call keep Python out of the way; few let callbacks and the progress bar act in time. The numbers
do not depend on it: the same program runs whatever the number.
"""

from __future__ import annotations

from typing import Any

from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange

TARGET_SECONDS = 0.1
"""How long a call should take: callbacks should wait for twice as long at most."""

_GROWTH = 8  # times as many steps as in the call before, at most
_MOST = 4096
_MEETING = 8  # calls between two exchanges, in which the workers agree on the number
_FIRST_MEETINGS = 8  # calls with an exchange each, while the number grows


class Call:
    """One call of a train or test function, which gets it as its iterator over batches.

    Args:
        iterator: what the batches are read from.
        steps: to be made.

    Attributes:
        iterator, steps: as given.
        ran: steps that were made, once they are: fewer if the data ended.
        seconds: that they took, if later steps will take as long.
    """

    def __init__(self, iterator: Any, steps: int) -> None:
        self.iterator = iterator
        self.steps = steps
        self.ran: int | None = None
        self.seconds: float | None = None

    @property
    def unmade(self) -> int:
        """Steps that were not made because the data ended."""
        return 0 if self.ran is None else self.steps - self.ran

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class LastStep(int):
    """The number of a call's last step, which callbacks get before the call and read after it.

    It is the planned number. If the data ended earlier, adding to it gives the right sum all the same.
    """

    call: Call

    def __new__(cls, step: int, call: Call) -> LastStep:  # noqa: D102
        made = super().__new__(cls, step)
        made.call = call
        return made

    def __add__(self, other: int) -> int:
        return int(self) - self.call.unmade + other


class CallSize:
    """Finds the number of steps for the calls of one epoch iterator.

    Args:
        layout: how the replicas are spread; all workers must ask for each call.
        every_batch: whether each call is one step, because a callback looks at each batch.
    """

    def __init__(self, layout: ReplicaLayout, *, every_batch: bool) -> None:
        self.every_batch = every_batch
        self._layout = layout
        self._size = 1
        self._proposed = 1
        self._calls = 0

    def steps(self) -> int:
        """How many steps the next call may make. All workers must call it equally often."""
        if self.every_batch:
            return 1
        self._calls += 1
        if self._layout.workers == 1:
            self._size = self._proposed
        elif self._calls > 1 and (self._calls <= _FIRST_MEETINGS or self._calls % _MEETING == 0):
            # The slowest worker counts: a call is over when all have made its steps.
            self._size = min(exchange(self._layout, self._proposed))
        return self._size

    def note(self, call: Call) -> None:
        """Learns from a call that was made."""
        if self.every_batch or not call.ran or call.seconds is None:
            return
        fitting = int(TARGET_SECONDS * call.ran / max(call.seconds, 1e-6))
        self._proposed = max(1, min(fitting, _GROWTH * call.ran, _MOST))
