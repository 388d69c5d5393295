"""The connections of a worker to its peers: sends and receives signed frames, and finds out who is lost.

Every worker keeps its connection to the first worker from the rendezvous. A thread in each worker receives
frames and sends signs of life, also while the program does something else. What the frames mean is not
decided here, but in `peers.py`.
"""

from __future__ import annotations

import abc
import selectors
import socket
import struct
import threading
from collections.abc import Mapping

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.plain_text import cleaned
from dtrain.process_group.peer_link import (
    LostPeers,
    PeerLink,
    Wakeup,
    parsed_process,
    runs_here,
    this_process,
)
from dtrain.process_group.peer_liveness import CHECK_INTERVAL, PeerLiveness
from dtrain.process_group.rendezvous_verdict import Connection
from dtrain.process_group.signed_frames import ForgedFrameError

# The kinds of frames that are handled here; a subclass has others.
# HELLO is each side's first frame; the first worker sends nothing before the other's.
HELLO, ALIVE, LOST = 0, 1, 5

SHOWN = 300
"""The most characters shown of a text from another worker."""

_ANSWER = 2.0  # seconds in which messages are sent
_PAUSE = 0.005  # seconds between two checks whether all is sent


class PeerConnections(abc.ABC):
    """A worker's connections, and the thread that serves them.

    Args:
        rank: this worker's number.
        size: the number of workers.
        connections: the connections of the rendezvous, by worker: on the first worker one to each other
            worker, elsewhere the one to the first.
        clock: the clock of all time limits.

    Attributes:
        rank, size: as given.
        hosts: the names of the hosts of this worker and of those connected to it, by worker.
    """

    def __init__(
        self, rank: int, size: int, connections: Mapping[int, Connection], clock: Clock = REAL
    ) -> None:
        self.rank = rank
        self.size = size
        self.hosts = {rank: socket.gethostname()}
        self._links = {
            worker: PeerLink(worker, connection, first=rank == 0)
            for worker, connection in connections.items()
        }
        self._clock = clock
        self._liveness = PeerLiveness(
            self._links, lambda worker: runs_here(self._links[worker].process), clock
        )
        self._changed = threading.Condition()
        self._wakeup = Wakeup()
        self._lost = LostPeers(clock)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.reader, selectors.EVENT_READ)
        for link in self._links.values():
            self._selector.register(link.sock, selectors.EVENT_READ, data=link)

    def _start(self) -> None:
        """Greets the first worker and starts the thread; called when the subclass is ready for frames."""
        if self.rank > 0:
            with self._changed:
                self._send(0, HELLO, body=this_process())
        self._thread = threading.Thread(target=self._run, name="dtrain-peers", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _receive_from(self, worker: int, kind: int, number: int, body: bytes) -> None:
        """Receives a frame of the subclass's kinds; called with the lock held.

        Raises:
            ValueError, struct.error: the frame cannot be read.
        """

    def flush(self) -> None:
        """Waits until all that was sent is on its way, for at most two seconds."""
        deadline = self._clock.deadline(_ANSWER)
        while any(link.unsent for link in [*self._links.values()]) and not deadline.passed():
            self._clock.sleep(_PAUSE)

    def close(self) -> None:
        """Closes the connections; workers that wait for this one raise an error."""
        self.flush()
        with self._changed:
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._wakeup.wake()

    def close_in_child(self) -> None:
        """Closes the sockets in a forked process, so that peers see when this worker has ended."""
        for link in self._links.values():
            link.close()

    def _wait(self, deadline: Deadline) -> None:
        """Waits until something has changed, or until it is time to check again."""
        self._changed.wait(min(CHECK_INTERVAL, max(0.001, deadline.left())))

    def _send(self, worker: int, kind: int, number: int = 0, body: bytes = b"") -> None:
        link = self._links.get(worker)
        if link is None:
            return
        try:
            link.send(kind, number, body)
        except OSError as error:
            self._lose(worker, str(error))
            return
        self._liveness.note_sent(worker)
        if link.unsent:
            self._wakeup.wake()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # without this thread, every wait would be for ever
            with self._changed:
                for worker in [*self._links]:
                    self._lose(worker, f"this worker's own connections failed: {error!r}")
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._links:
                    return
                for link in self._links.values():
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
                    if self._selector.get_key(link.sock).events != wanted:
                        self._selector.modify(link.sock, wanted, data=link)
            ready = self._selector.select(timeout=CHECK_INTERVAL)
            with self._changed:
                for key, events in ready:
                    if key.data is None:
                        self._wakeup.clear()
                    elif key.data.worker in self._links:
                        self._handle(key.data, events)
                if self._liveness.check_is_due():
                    self._check_liveness()

    def _handle(self, link: PeerLink, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                link.flush()
            if events & selectors.EVENT_READ:
                self._liveness.note_heard(link.worker)
                for frame in link.receive():
                    self._receive(link, *frame)
        except OSError as error:
            self._lose(link.worker, str(error), forged=isinstance(error, ForgedFrameError))
        except (ValueError, struct.error) as error:
            self._lose(link.worker, f"what it sent cannot be read ({error})", forged=True)

    def _receive(self, link: PeerLink, kind: int, number: int, body: bytes) -> None:
        if kind == HELLO:
            link.process, self.hosts[link.worker] = parsed_process(body)
            if self.rank == 0:
                link.open = True
                self._send(link.worker, HELLO, body=this_process())
                for worker, why in self._lost.reasons().items():
                    self._send(link.worker, LOST, worker, why.encode())
        elif kind == LOST:
            self._lost.note(number, cleaned(body.decode("utf-8", "replace"), SHOWN))
        elif kind != ALIVE:
            self._receive_from(link.worker, kind, number, body)
        self._changed.notify_all()

    def _check_liveness(self) -> None:
        """Sends signs of life, and drops workers that have sent none for too long."""
        for worker, link in [*self._links.items()]:
            if link.open and self._liveness.is_due(worker):
                self._send(worker, ALIVE)
            if worker in self._links and self._liveness.is_lost(worker):
                self._lose(worker, f"it has sent no sign of life for {self._liveness.silence(worker):.0f} s")

    def _lose(self, worker: int, why: str, *, forged: bool = False) -> None:
        link = self._links.pop(worker, None)
        if link is None:
            return
        self._selector.unregister(link.sock)
        link.close()
        self._lost.note(worker, why, forged=forged)
        for other in [*self._links.values()] if self.rank == 0 else []:
            if other.open:
                self._send(other.worker, LOST, worker, why.encode())
        self._changed.notify_all()
