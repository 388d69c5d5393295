"""The connected workers of a job: exchanges small values among them, and finds out which of them are lost.

Every worker keeps its connection to the first worker from the rendezvous. The first worker collects the
values of all workers, and sends all of them to each. A thread in each worker answers and sends signs of life,
also while the program does something else. The tensors of a step do not travel here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from dtrain.clock import REAL, Clock, Deadline
from dtrain.cluster import mpi
from dtrain.cluster.peer_link import (
    ForgedFrameError,
    LostPeers,
    PeerLink,
    Wakeup,
    joined,
    parsed_process,
    runs_here,
    split,
    this_process,
)
from dtrain.cluster.peer_liveness import CHECK_INTERVAL, PeerLiveness
from dtrain.cluster.rendezvous import run_rendezvous
from dtrain.cluster.rendezvous_lines import Connection
from dtrain.cluster.secret import Secret, job_secret
from dtrain.errors import AuthenticationError, PeerMissingError
from dtrain.plain_text import cleaned
from dtrain.topology import Topology

# The kinds of frames. HELLO is each side's first frame; the first worker sends nothing before the other's.
_HELLO, _ALIVE, _VALUE, _ALL, _MISSING, _LOST, _NOTE = range(7)

_GRACE = 5.0  # seconds in which values that a lost worker sent before its end may still arrive elsewhere
_ANSWER = 2.0  # seconds in which the first worker must say who is missing, and messages are sent
_PAUSE = 0.005  # seconds between two checks whether all is sent
_LEAVE = 5.0  # seconds in which all workers should end their programs
_LAST_ROUND = (1 << 64) - 1  # of the end of the programs: no other round has this number
_SHOWN = 300  # the most characters shown of a text from another worker


class Peers:
    """This worker's connections to its peers.

    Args:
        rank: this worker's number.
        size: the number of workers.
        connections: the connections of the rendezvous, by worker: on the first worker one to each other
            worker, elsewhere the one to the first.
        secret: the secret of the job, if its processes share one.
        clock: the clock of all time limits.

    Attributes:
        rank, size, secret: as given.
        hosts: the names of the hosts of this worker and of those connected to it, by worker.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        *,
        secret: Secret | None = None,
        clock: Clock = REAL,
    ) -> None:
        self.rank = rank
        self.size = size
        self.secret = secret
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
        self._round = 0
        self._values: dict[int, dict[int, bytes]] = {}  # on the first worker: of rounds that are not complete
        self._complete: dict[int, list[bytes]] = {}
        self._abandoned: set[int] = set()  # rounds for which this worker does not wait any more
        self._missing: dict[int, list[int]] = {}  # answers about rounds, from the first worker
        self._notes: deque[tuple[int, bytes]] = deque()
        self._lost = LostPeers(clock)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.reader, selectors.EVENT_READ)
        for link in self._links.values():
            self._selector.register(link.sock, selectors.EVENT_READ, data=link)
        if rank > 0:
            with self._changed:
                self._send(0, _HELLO, body=this_process())
        self._thread = threading.Thread(target=self._run, name="dtrain-peers", daemon=True)
        self._thread.start()

    def all_gather(self, value: bytes, timeout: float | None = None) -> list[bytes]:
        """Sends this worker's value to all workers; returns the values of all, by worker.

        All workers must call it, equally often.

        Args:
            value: any bytes.
            timeout: seconds to wait for the other workers; None waits as long as they are alive.

        Raises:
            PeerMissingError: a worker is lost, or did not call it in time.
            AuthenticationError: a frame in a worker's name was not signed by that worker.
        """
        deadline = self._clock.deadline(timeout)
        with self._changed:
            number, self._round = self._round, self._round + 1
            if self.rank == 0:
                self._collect(0, number, value)
            else:
                self._send(0, _VALUE, number, value)
            while number not in self._complete:
                self._lost.raise_if_any(0.0)
                if deadline.passed() and (missing := self._who_is_missing(number)):
                    self._abandoned.add(number)
                    raise _late(missing, timeout or 0.0)
                self._wait(deadline)
            return self._complete.pop(number)

    def check(self) -> None:
        """Returns if no worker is known to be lost; for workers that wait for others elsewhere.

        Raises:
            PeerMissingError: a worker was lost at least 5 s ago.
            AuthenticationError: a frame in a worker's name was not signed by that worker.
        """
        with self._changed:
            self._lost.raise_if_any(_GRACE)

    def send_to_first(self, note: bytes) -> None:
        """Sends a note to the first worker, and does not wait; it arrives before this worker's next value."""
        with self._changed:
            self._send(0, _NOTE, 0, note)

    def receive_notes(self) -> list[tuple[int, bytes]]:
        """On the first worker: the notes that have come since the last call, each with its worker."""
        with self._changed:
            found = [*self._notes]
            self._notes.clear()
            return found

    def leave(self) -> None:
        """Waits until all workers end their programs, for at most five seconds.

        What this worker sent last, for example by MPI, can be lost at its end while a peer waits for it.
        """
        self._round = _LAST_ROUND
        if self._links and not self._lost:
            with contextlib.suppress(PeerMissingError, AuthenticationError):
                self.all_gather(b"", _LEAVE)

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

    def _who_is_missing(self, number: int) -> list[int]:
        """The workers whose values of a round have not come; [] if the round is complete."""
        if self.rank == 0:
            there = self._values.get(number)
            return [] if there is None else [w for w in range(self.size) if w not in there]
        self._send(0, _MISSING, number)
        deadline = self._clock.deadline(_ANSWER)
        while number not in self._missing and number not in self._complete and not self._lost:
            if deadline.passed():
                break
            self._wait(deadline)
        if number not in self._missing and number not in self._complete:
            self._lost.raise_if_any(0.0)
        return self._missing.pop(number, [] if number in self._complete else [0])

    def _wait(self, deadline: Deadline) -> None:
        """Waits until something has changed, or until it is time to check again."""
        self._changed.wait(min(CHECK_INTERVAL, max(0.001, deadline.left())))

    def _collect(self, worker: int, number: int, value: bytes) -> None:
        """On the first worker: keeps a value, and sends all values of its round when they are complete."""
        values = self._values.setdefault(number, {})
        values[worker] = value
        if len(values) < self.size:
            return
        everyone = [values[each] for each in range(self.size)]
        del self._values[number]
        self._keep(number, everyone)
        body = joined(everyone)
        for other in [*self._links]:
            self._send(other, _ALL, number, body)
        self._changed.notify_all()

    def _keep(self, number: int, everyone: list[bytes]) -> None:
        if number in self._abandoned:
            self._abandoned.remove(number)
        else:
            self._complete[number] = everyone

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
        if kind == _HELLO:
            link.process, self.hosts[link.worker] = parsed_process(body)
            if self.rank == 0:
                link.open = True
                self._send(link.worker, _HELLO, body=this_process())
                for worker, why in self._lost.reasons().items():
                    self._send(link.worker, _LOST, worker, why.encode())
        elif kind == _VALUE and self.rank == 0:
            self._collect(link.worker, number, body)
        elif kind == _NOTE and self.rank == 0:
            self._notes.append((link.worker, body))
        elif kind == _MISSING and self.rank == 0:
            missing = self._who_is_missing(number)
            self._send(link.worker, _MISSING, number, b" ".join(b"%d" % worker for worker in missing))
        elif kind == _MISSING:
            self._missing[number] = [int(worker) for worker in body.split()]
        elif kind == _ALL:
            self._keep(number, split(body, self.size))
        elif kind == _LOST:
            self._lost.note(number, cleaned(body.decode("utf-8", "replace"), _SHOWN))
        self._changed.notify_all()

    def _check_liveness(self) -> None:
        """Sends signs of life, and drops workers that have sent none for too long."""
        for worker, link in [*self._links.items()]:
            if link.open and self._liveness.is_due(worker):
                self._send(worker, _ALIVE)
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
                self._send(other.worker, _LOST, worker, why.encode())
        self._changed.notify_all()


def _late(missing: Sequence[int], timeout: float) -> PeerMissingError:
    who = f"Worker {missing[0]}" if len(missing) == 1 else f"Workers {', '.join(map(str, missing))}"
    return PeerMissingError(
        f"{who} did not reach this point within {timeout:g} s.",
        hint="barrier, broadcast and fit must be called by every worker, equally often",
    )


_current: tuple[Topology, Peers] | None = None


def connect(topology: Topology, *, timeout: float | None = None, clock: Clock = REAL) -> Peers:
    """Connects this worker with the others of its job, by a rendezvous.

    A call for another job first closes the connections of the earlier one.

    Args:
        topology: the job, of several training tasks.
        timeout: as `run_rendezvous`.
        clock: the clock of all time limits.

    Returns:
        The connected peers; of an earlier call, if it was for the same job.

    Raises:
        PortInUseError, PeerMissingError, PeerMismatchError, ConfigurationError, ClusterConfigError: as
            `run_rendezvous`.
    """
    global _current
    if _current is not None and _current[0] == topology:
        return _current[1]
    _close()
    _current = None
    connections = run_rendezvous(topology, timeout=timeout, clock=clock)
    secret = job_secret(topology)
    peers = Peers(topology.rank, topology.world_size, connections, secret=secret, clock=clock)
    _current = topology, peers
    return peers


def connected() -> Peers | None:
    """The connected peers of this process; None before `connect`."""
    return None if _current is None else _current[1]


def check() -> None:
    """As `Peers.check`, of the connected peers; returns if there are none."""
    if _current is not None:
        _current[1].check()


def _end() -> None:
    # The connections stay open: whoever waits for this worker must not end before this process.
    if _current is not None:
        if not mpi.failed():  # others may wait for a worker that failed
            _current[1].leave()
        _current[1].flush()


def _close() -> None:
    if _current is not None:
        _current[1].close()


def _close_in_child() -> None:
    global _current
    if _current is not None:
        _current[1].close_in_child()
    _current = None


atexit.register(_end)
mpi.before_leaving(_close)  # MPI waits for ranks that may wait for this one
os.register_at_fork(after_in_child=_close_in_child)
