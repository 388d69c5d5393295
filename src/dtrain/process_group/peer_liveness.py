"""The rules of liveness between workers: who is due a sign of life, and whose silence means that it is lost.

Silence is counted while this process runs, so that nobody is lost because this process was stopped. Nothing
is sent or closed here: `peers` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dtrain.base.clock import REAL, Clock, RunClock

CHECK_INTERVAL = 1.0
"""Seconds between two checks of who is alive."""

_BEAT = 2.0  # seconds after the last frame until a sign of life is sent
_STOPPED = 8.0  # seconds of silence after which a process of this machine that is stopped is lost
# A worker that holds Python's lock is silent too. A broken link ends its connection much earlier.
_SILENT = 600.0  # seconds of silence after which a worker of another machine is lost


class PeerLiveness:
    """When this worker last heard each of its peers, and when it last sent something to them.

    Only the time counts as silence in which this process ran (`RunClock`).

    Args:
        workers: the numbers of the peers.
        runs: whether a peer is a process of this machine that runs, and is not stopped; None if it is on
            another machine.
        clock: the clock of all limits.
    """

    def __init__(
        self, workers: Iterable[int], runs: Callable[[int], bool | None], clock: Clock = REAL
    ) -> None:
        self._runs = runs
        self._clock = clock
        self._running = RunClock(clock, CHECK_INTERVAL)
        self._checked = clock.now()
        self._heard = dict.fromkeys(workers, 0.0)  # by `_running`
        self._sent = dict.fromkeys(self._heard, self._checked)  # by the clock

    def note_heard(self, worker: int) -> None:
        """Notes that bytes of a peer have come."""
        self._heard[worker] = self._running.now()

    def note_sent(self, worker: int) -> None:
        """Notes that a frame was sent to a peer."""
        self._sent[worker] = self._clock.now()

    def check_is_due(self) -> bool:
        """Whether `CHECK_INTERVAL` has passed since the last check; if so, the time until now is counted."""
        if self._clock.now() - self._checked < CHECK_INTERVAL:
            return False
        self._running.check()
        self._checked = self._clock.now()
        return True

    def is_due(self, worker: int) -> bool:
        """Whether a peer is due a sign of life."""
        return self._clock.now() - self._sent[worker] >= _BEAT

    def silence(self, worker: int) -> float:
        """The seconds, while this process ran, since the last bytes of a peer."""
        return self._running.now() - self._heard[worker]

    def is_lost(self, worker: int) -> bool:
        """Whether the silence of a peer means that it is lost. A busy process of this machine never is."""
        silence = self.silence(worker)
        if silence < _STOPPED:
            return False
        runs = self._runs(worker)
        return runs is False or (runs is None and silence >= _SILENT)
