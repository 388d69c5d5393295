"""Collects each worker's own step times on the first worker, and detects a slow worker.

A worker's own step time excludes waiting for other workers. The workers publish their times without waiting
for a reader, so collecting changes no timing.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

from dtrain.errors import AuthenticationError
from dtrain.keras_engine import messages
from dtrain.keras_engine.peer_exchange import HINT, store
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.plain_text import cleaned
from dtrain.slowness import is_slow, slow_line
from dtrain.training_rate import Totals

_TOPIC = "times"
_PARTS = {
    *("fit", "task", "host", "epoch", "step_seconds", "own_step_seconds"),
    *("reading", "between", "parts"),
}
_INTERVAL = 1.0  # the least seconds between two messages of a worker, and between two collections
_WAIT = 2  # milliseconds to wait for a message that may not be published
_READ = 10_000  # milliseconds to wait for a message that is published

_fits = itertools.count()  # numbers of `fit` calls, the same on every worker
_published = 0  # messages that this process has published
_read: dict[int, int] = {}  # the number of messages read from each worker


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
        self._sent_at = self._received_at = -_INTERVAL
        self._found: dict[int, dict[str, Any]] = {}

    def publish(self, epoch: int, before: Totals, now: Totals, parts: dict[str, float]) -> None:
        """Publishes this worker's times of an epoch, at most once a second.

        Args:
            epoch: the number of the epoch, from 0.
            before: the totals at the beginning of the epoch.
            now: the totals at its end.
            parts: seconds of the epoch by part (`time_breakdown.PARTS`).
        """
        each, own, reading, between = now.per_step(before)
        if each is None:
            return
        self._mine = {
            "task": f"worker {self._layout.worker}",
            "host": socket.gethostname(),
            "epoch": epoch,
            "step_seconds": round(each, 6),
            "own_step_seconds": None if own is None else round(own, 6),
            "reading": reading,
            "between": between,
            "parts": dict(parts),
        }
        self._unsent = True
        if time.monotonic() - self._sent_at >= _INTERVAL:
            self.publish_rest()

    def publish_rest(self) -> int:
        """Publishes times that were held back to limit the messages.

        Returns:
            How many messages this process has published so far.
        """
        global _published
        if self._mine is not None and self._unsent and not self.first:
            message = messages.encode({"fit": self._fit, **self._mine})
            store(self._layout).put(_TOPIC, _published, self._layout.worker, message)
            _published += 1
        self._unsent, self._sent_at = False, time.monotonic()
        return _published

    def known(self, published: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The newest times received from each worker, possibly of different epochs; [] on other workers.

        Args:
            published: how many messages each worker has published; None if that is not known.

        Raises:
            AuthenticationError: a message was not written by its worker.
        """
        if not self.first or self._layout.workers == 1:
            return []
        if self._mine is not None:
            self._found[0] = self._mine
        if published is not None or time.monotonic() - self._received_at >= _INTERVAL:
            self._received_at = time.monotonic()
            for worker in range(1, self._layout.workers):
                self._receive(worker, 0 if published is None else published[worker])
        return [self._found[worker] for worker in sorted(self._found)]

    def _receive(self, worker: int, published: int) -> None:
        """Reads all messages that a worker has published; waits for those up to the number `published`."""
        while True:
            number = _read.get(worker, 0)
            there = store(self._layout)
            text = there.get(_TOPIC, number, worker, _READ if number < published else _WAIT)
            if text is None:
                return
            _read[worker] = number + 1
            there.remove(_TOPIC, number, worker)  # no other worker reads it
            message = _decoded(text, worker)
            if message.pop("fit") == self._fit:  # else it is left from a `fit` that ended with an error
                self._found[worker] = message


def slow_worker(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cause for a time report if the workers wait for a slow worker: a list of one `cause`, or []."""
    own = {each["task"]: each for each in workers if each["own_step_seconds"] is not None}
    for task, each in own.items():
        others = [other["own_step_seconds"] for name, other in own.items() if name != task]
        if not others:
            continue
        mine, usual = each["own_step_seconds"], statistics.median(others)
        if is_slow(mine, usual, each["step_seconds"]):
            line = slow_line(
                f"{task} ({each['host']})", mine, usual, reading=each["reading"], between=each["between"]
            )
            share = min(1.0, (mine - usual) / max(each["step_seconds"], 1e-9))
            return [{"cause": "slow_worker", "task": task, "share": round(share, 4), "text": f"{line}."}]
    return []


def _decoded(text: str, worker: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = messages.decode(text)
        if isinstance(found, dict) and set(found) == _PARTS:
            return {**found, "task": f"worker {worker}", "host": cleaned(str(found["host"]), 100)}
    raise AuthenticationError(f"What is there for worker {worker} are no worker's times.", hint=HINT)
