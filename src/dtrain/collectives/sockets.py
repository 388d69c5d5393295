"""The transport "ring": collective calls over sockets between each two workers, for jobs without MPI.

Tensors are sent directly from their memory, and received directly into the memory of the result. TensorFlow's
own collectives copy each message several times, which takes four times the processor time for a 30 MB model.
The sockets are connected in `connect`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from dtrain.base.clock import REAL, Clock
from dtrain.base.tcp import notice_broken_link, split_address
from dtrain.collectives.calls import Calls, Parts, raw
from dtrain.collectives.connect import connect_all
from dtrain.collectives.transport import Facts, Transport
from dtrain.environments.topology import Topology
from dtrain.errors import PeerMissingError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers

_AT_ONCE = 1 << 20  # bytes in one call of send or receive, so that both take turns
_CHECK_SECONDS = 1.0  # seconds between two checks whether the peers are alive


class Sockets(Transport):
    """Sockets between each two workers; TensorFlow's ring where a worker has GPUs or several replicas."""

    name = "ring"

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Connects by sockets, if every worker has one CPU replica.

        Raises:
            PeerMissingError: two workers could not be connected, or a worker is lost.
        """
        if any(worker_facts.gpus or worker_facts.replicas > 1 for worker_facts in facts):
            return None, ""
        sockets = connect_all(layout, split_address(topology.address)[0])
        kinds = sorted({"local" if sock.family == socket.AF_UNIX else "TCP" for sock in sockets.values()})
        calls = SocketCalls(layout.worker, sockets, check=peers.check)
        return calls, f"sockets ({' and '.join(kinds)})"


class SocketCalls(Calls):
    """Collective calls over one socket to each peer.

    Args:
        rank: this worker's number.
        peers: a connected socket for each other worker; this object owns them from now on.
        check: called about once a second while this worker waits; raises if a peer is lost.
        clock: measures how long this worker waits.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        *,
        check: Callable[[], None] = lambda: None,
        clock: Clock = REAL,
    ) -> None:
        super().__init__(rank, len(peers) + 1)
        self._peers = dict(peers)
        self._check = check
        self._clock = clock
        self._poll = select.poll()
        for peer in self._peers.values():
            peer.setblocking(False)
            notice_broken_link(peer)
            if peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Closes the connections; peers that wait for this worker get a `PeerMissingError`."""
        for peer in self._peers.values():
            peer.close()

    def _barrier_with(self, kind: int, value: np.ndarray) -> list[np.ndarray]:
        begun = self._clock.now()
        header = np.array([kind, value.nbytes], np.int64)
        message = np.concatenate([raw(header), raw(value)])
        headers = [header if r == self.rank else np.empty_like(header) for r in range(self.size)]
        self._swap(
            self._for_others([message] * self.size), self._for_others([raw(received) for received in headers])
        )
        self._compare([received.tolist() for received in headers])
        values = [value if r == self.rank else np.empty_like(value) for r in range(self.size)]
        self._swap([None] * self.size, self._for_others([raw(received) for received in values]))
        self.waited += self._clock.now() - begun
        return values

    def _swap(self, out: Parts, into: Parts) -> None:
        self._swap_all([out], [into])

    def _swap_all(self, out: Sequence[Parts], into: Sequence[Parts]) -> None:
        sending, receiving = _by_peer(out), _by_peer(into)
        while sending or receiving:
            moved = self._send_some(sending)
            moved = self._receive_some(receiving) or moved
            if not moved:
                self._wait(sending, receiving)

    def _send_some(self, sending: dict[int, list[memoryview]]) -> bool:
        """Sends to each peer from the first of its parts; removes what is sent."""
        moved = False
        for r, parts in [*sending.items()]:
            try:
                sent = self._peers[r].send(parts[0][:_AT_ONCE])
            except BlockingIOError:
                continue
            except OSError as error:
                raise _gone(r, str(error)) from None
            moved = True
            _remove(sending, r, sent)
        return moved

    def _receive_some(self, receiving: dict[int, list[memoryview]]) -> bool:
        """Receives from each peer into the first of its parts; removes what has come."""
        moved = False
        for r, parts in [*receiving.items()]:
            try:
                came = self._peers[r].recv_into(parts[0][:_AT_ONCE])
            except BlockingIOError:
                continue
            except OSError as error:
                raise _gone(r, str(error)) from None
            if came == 0:
                raise _gone(r, "it has closed the connection")
            moved = True
            _remove(receiving, r, came)
        return moved

    def _wait(self, sending: Collection[int], receiving: Collection[int]) -> None:
        """Sleeps until a socket is ready to send or receive; calls `check` about once a second."""
        watched = {*sending, *receiving}
        for r in watched:
            events = (select.POLLIN if r in receiving else 0) | (select.POLLOUT if r in sending else 0)
            self._poll.register(self._peers[r], events)
        try:
            while not self._poll.poll(_CHECK_SECONDS * 1000):
                self._check()
        finally:
            for r in watched:
                self._poll.unregister(self._peers[r])


def _by_peer(parts: Sequence[Parts]) -> dict[int, list[memoryview]]:
    """The bytes of several lists of parts by worker, in their order; workers without bytes are left out."""
    by_peer: dict[int, list[memoryview]] = {}
    for by_worker in parts:
        for r, part in enumerate(by_worker):
            if part is not None and part.size:
                by_peer.setdefault(r, []).append(part.data)
    return by_peer


def _remove(parts: dict[int, list[memoryview]], worker: int, size: int) -> None:
    """Removes so many bytes, which were sent or received, from the beginning of a worker's first part."""
    rest = parts[worker]
    rest[0] = rest[0][size:]
    if not rest[0]:
        del rest[0]
    if not rest:
        del parts[worker]


def _gone(worker: int, why: str) -> PeerMissingError:
    return PeerMissingError(
        f"Worker {worker}, with which this one reduces, is gone: {why}.",
        hint="see why it ended; `dtrain launch` starts all workers again (--max-restarts N)",
    )
