"""How many steps a call of the train or test function makes."""

from __future__ import annotations

from dtrain.engine.loops.step_calls import Call
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange

TARGET_SECONDS = 0.1
"""The intended duration of a call; callbacks should wait for at most twice as long."""

_GROWTH = 8  # the most by which the number of steps is multiplied from one call to the next
_MOST = 4096  # the most steps of a call
_MEETING = 8  # at every eighth call, the workers exchange and agree on the number
_FIRST_MEETINGS = 8  # up to this call, they do so at every call but the first, while the number grows


class CallSize:
    """Chooses the number of steps for the calls of one epoch iterator.

    With more steps per call, Python costs less per step; with fewer, callbacks and the progress bar are
    called in time. The results do not depend on the number, because the same program runs.

    Args:
        layout: how the replicas are distributed.
        every_batch: whether each call is one step, because a callback needs each batch.
        alone: whether replicas train alone in rounds, within which nothing is sent.
    """

    def __init__(self, layout: ReplicaLayout, *, every_batch: bool, alone: bool = False) -> None:
        self.every_batch = every_batch
        self._alone = alone
        self._layout = layout
        self._size = 1
        self._proposed = 1
        self._calls = 0

    def steps(self, *, round_begins: bool = True) -> int:
        """The most steps of the next call. All workers must call it, equally often.

        They make equal calls: by the number of calls they agree when to stop, and at their ends when to save.

        Args:
            round_begins: whether a round begins, where replicas train alone: then the workers agree.
        """
        if self.every_batch:
            return 1
        self._calls += 1
        meets = self._calls <= _FIRST_MEETINGS or self._calls % _MEETING == 0
        if self._layout.workers == 1:
            self._size = self._proposed
        elif self._calls > 1 and (round_begins if self._alone else meets):
            # The slowest worker decides, because a call ends when all workers have run its steps.
            self._size = min(exchange(self._layout, self._proposed, what="the steps of a call"))
        return self._size

    def note(self, call: Call) -> None:
        """Adjusts the number of steps to the time that a call took."""
        if self.every_batch or not call.ran or call.seconds is None:
            return
        fitting = int(TARGET_SECONDS * call.ran / max(call.seconds, 1e-6))
        self._proposed = max(1, min(fitting, _GROWTH * call.ran, _MOST))
