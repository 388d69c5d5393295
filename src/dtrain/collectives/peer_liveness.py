"""Checks whether the peers are alive; a worker that waits for others calls it about once a second.

TensorFlow's coordination service knows, but a request over a broken link never returns. So a worker first
checks whether the service can be reached at all. It restarts no worker.
"""

from __future__ import annotations

import socket
import time
from collections import Counter

from dtrain.errors import PeerMissingError
from dtrain.topology import Topology, split_address
from dtrain.upstream import processes

PATIENCE = 10.0  # seconds without an answer until the service counts as lost, as for TensorFlow's heartbeats
_CONNECT = 1.0  # seconds that connecting may take


class PeerLiveness:
    """Finds out whether the workers of a job are alive.

    Args:
        topology: the topology of the job. The coordination service runs in the task of rank 0.
    """

    def __init__(self, topology: Topology) -> None:
        tasks = topology.training_tasks()
        self._jobs = Counter(task.job for task in tasks)
        self._service = None if topology.rank == 0 else split_address(topology.address_of(tasks[0]))
        self._name = str(tasks[0])
        self._silent_since: float | None = None
        self._checked_at = time.monotonic()

    def check(self) -> None:
        """Returns if no worker is known to be lost.

        Raises:
            PeerMissingError: TensorFlow has lost a worker, or the task of rank 0 was unreachable for
                `PATIENCE` seconds.
        """
        if self._service is not None and not _answers(self._service):
            self._note_silence()
            return
        self._silent_since = None
        lost = processes.lost_tasks(self._jobs)
        if lost:
            raise PeerMissingError(
                f"While this worker waited for the others, TensorFlow lost {', '.join(lost)}.",
                hint="see why they ended; `dtrain launch --max-restarts N` starts all of them again",
            )

    def _note_silence(self) -> None:
        now = time.monotonic()
        if self._silent_since is None or now - self._checked_at > PATIENCE / 2:  # no check in between
            self._silent_since = now
        self._checked_at = now
        silent = now - self._silent_since
        if silent >= PATIENCE:
            raise PeerMissingError(
                f"While this worker waited for the others, {self._name}, through which they know of each "
                f"other, could not be reached for {silent:.0f} s.",
                hint="see whether it runs, and whether its machine can be reached from this one",
            )


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT).close()
    except OSError:
        return False
    return True
