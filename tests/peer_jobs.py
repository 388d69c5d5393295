"""Several connected workers in this process, on one given clock."""

from __future__ import annotations

import socket

from dtrain.process_group.peers import Peers
from dtrain.process_group.rendezvous_lines import Connection
from given_clock import GivenClock


class PeerJob:
    """The workers of a job, connected by socket pairs.

    Args:
        size: the number of workers.
        key: the key of all connections.
    """

    def __init__(self, size: int, key: bytes = b"key") -> None:
        self.clock = GivenClock()
        pairs = {worker: socket.socketpair() for worker in range(1, size)}
        ends = {worker: Connection(pair[0], key) for worker, pair in pairs.items()}
        self.workers = [Peers(0, size, ends, clock=self.clock)]
        for worker, pair in pairs.items():
            self.workers.append(Peers(worker, size, {0: Connection(pair[1], key)}, clock=self.clock))
