"""Several connected workers in this process, on one given clock."""

from __future__ import annotations

import socket

from dtrain.process_group.peers import Peers
from dtrain.process_group.rendezvous_verdict import Connection
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import SignedFrames
from given_clock import GivenClock

KEY = Secret(b"of the connection", "a test")


def connection(sock: socket.socket, key: Secret | None, *, first: bool) -> Connection:
    """The first worker's end of a connection, which has accepted it, or the other end."""
    return Connection(sock, SignedFrames(key, connected=not first))


class PeerJob:
    """The workers of a job, connected by socket pairs.

    Args:
        size: the number of workers.
        key: the key of all connections; None without a secret.
    """

    def __init__(self, size: int, key: Secret | None = KEY) -> None:
        self.clock = GivenClock()
        pairs = {worker: socket.socketpair() for worker in range(1, size)}
        ends = {worker: connection(pair[0], key, first=True) for worker, pair in pairs.items()}
        self.workers = [Peers(0, size, ends, clock=self.clock)]
        for worker, pair in pairs.items():
            end = {0: connection(pair[1], key, first=False)}
            self.workers.append(Peers(worker, size, end, clock=self.clock))
