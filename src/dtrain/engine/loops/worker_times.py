"""The times of each worker's epochs, which it sends to the first one; no worker waits for them."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

from dtrain.errors import AuthenticationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers
from dtrain.process_group.peer_link import HINT
from dtrain.process_group.plain_values import decode, encode
from dtrain.telemetry.training_clock import Totals

# The fields of a message of `WorkerTimes`.
_TIMES = {"fit", "epoch", "step_seconds", "own_step_seconds", "reading", "between", "parts"}
_INTERVAL = 1.0  # the least seconds between two of these messages of a worker
_fits = itertools.count()  # numbers of `fit` calls, the same on every worker


class WorkerTimes:
    """The times of all workers of a job, as far as the first worker has received them.

    Args:
        layout: the strategy's layout; None under parameter servers, where workers do not wait for each other.

    Attributes:
        first: whether this is the first worker, which receives the others' times.
    """

    def __init__(self, layout: ReplicaLayout | None) -> None:
        self._layout = ReplicaLayout() if layout is None else layout
        self.first = self._layout.worker == 0
        self._fit = next(_fits)
        self._mine: dict[str, Any] | None = None
        self._unsent = False
        self._sent_at = -_INTERVAL
        self._found: dict[int, dict[str, Any]] = {}

    def publish(self, epoch: int, before: Totals, now: Totals, parts: dict[str, float]) -> None:
        """Publishes this worker's times of an epoch, at most once a second.

        Args:
            epoch: the number of the epoch, from 0.
            before: the totals at the beginning of the epoch.
            now: the totals at its end.
            parts: seconds of the epoch by part (`events.PARTS`).
        """
        step_seconds, own, reading, between = now.per_step(before)
        if step_seconds is None:
            return
        self._mine = {
            "epoch": epoch,
            "step_seconds": round(step_seconds, 6),
            "own_step_seconds": None if own is None else round(own, 6),
            "reading": reading,
            "between": between,
            "parts": dict(parts),
        }
        self._unsent = True
        if time.monotonic() - self._sent_at >= _INTERVAL:
            self.publish_rest()

    def publish_rest(self) -> None:
        """Publishes times that were held back to limit the messages."""
        connected = peers.connected()
        if connected is not None and self._mine is not None and self._unsent and not self.first:
            message = encode({"fit": self._fit, **self._mine})
            connected.send_to_first(message.encode())
        self._unsent, self._sent_at = False, time.monotonic()

    def known(self) -> list[dict[str, Any]]:
        """The newest times received from each worker, possibly of different epochs; [] on other workers.

        Raises:
            AuthenticationError: a message was not written by its worker.
        """
        if not self.first or self._layout.workers == 1:
            return []
        if self._mine is not None:
            self._found[0] = self._mine
        connected = peers.connected()
        for worker, text in [] if connected is None else connected.receive_notes():
            message = _decoded(text.decode("ascii", "replace"), worker)
            if message.pop("fit") == self._fit:  # else it is left from a `fit` that ended with an error
                self._found[worker] = message
        hosts = {} if connected is None else connected.hosts
        return [
            {"task": f"worker {worker}", "host": hosts.get(worker, ""), **times}
            for worker, times in sorted(self._found.items())
        ]


def _decoded(text: str, worker: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        times = decode(text)
        if isinstance(times, dict) and set(times) == _TIMES:
            return times
    raise AuthenticationError(f"The message of worker {worker} does not hold step times.", hint=HINT)
