"""The connected workers of a job: exchanges small values among them, and finds out which of them are lost.

Every worker keeps its connection to the first worker from the rendezvous. The first worker collects the
values of all workers, and sends all of them to each. A thread in each worker answers and sends signs of life,
also while the program does something else. The tensors of a step do not travel here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from dtrain.base.clock import REAL, Clock
from dtrain.environments import mpi_start
from dtrain.environments.topology import Topology
from dtrain.errors import AuthenticationError, OperationMismatchError, PeerMissingError
from dtrain.process_group import operations, stops
from dtrain.process_group.operations import Operations
from dtrain.process_group.peer_connections import PeerConnections
from dtrain.process_group.peer_link import joined, split
from dtrain.process_group.rendezvous import run_rendezvous
from dtrain.process_group.rendezvous_verdict import Connection
from dtrain.process_group.secret import Secret, job_secret
from dtrain.process_group.stops import StopVotes

# The kinds of frames, beside those of the connections, of `operations.py` and of `stops.py`.
_VALUE, _ALL, _MISSING, _NOTE = 2, 3, 4, 6

_GRACE = 5.0  # seconds in which values that a lost worker sent before its end may still arrive elsewhere
_ANSWER = 2.0  # seconds in which the first worker must say who is missing
_LONG_STEP = 15.0  # seconds after which a step that cannot call `check` counts as waiting for others
_LEAVE = 5.0  # seconds in which all workers should end their programs
_LAST_ROUND = (1 << 64) - 1  # of the end of the programs: no other round has this number
_OPERATION_BITS = 23  # of the number of an operation that collectives compare


class Peers(PeerConnections):
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
        self.secret = secret
        self._round = 0  # the number of the next operation or exchange
        self._values: dict[int, dict[int, bytes]] = {}  # on the first worker: of rounds that are not complete
        self._complete: dict[int, list[bytes]] = {}
        self._abandoned: set[int] = set()  # rounds for which this worker does not wait any more
        self._missing: dict[int, list[int]] = {}  # answers about rounds, from the first worker
        self._notes: deque[tuple[int, bytes]] = deque()
        self._aborts = False
        super().__init__(rank, size, connections, clock)
        self._inside: float | None = None  # since when this worker is inside a step; None outside
        self._operations = Operations(rank, size, self._send, clock)
        self._stops = StopVotes(rank, size, self._send)
        self._start()

    def begin(self, operation: str) -> int:
        """Notes that this worker begins an operation, and does not wait; all workers must begin the same.

        Args:
            operation: what this worker does then, as for `all_gather`.

        Returns:
            The number of the operation, the same on every worker.

        Raises:
            OperationMismatchError: other workers are at another operation, as far as it is known yet.
            PeerMissingError: an error has ended another worker's operation.
        """
        with self._changed:
            self._operations.raise_if_unequal()
            number, self._round = self._round, self._round + 1
            self._operations.begin(number, operation.encode())
            return number

    def all_gather(self, value: bytes, timeout: float | None = None, *, operation: str = "") -> list[bytes]:
        """Sends this worker's value to all workers; returns the values of all, by worker.

        All workers must call it, equally often.

        Args:
            value: any bytes.
            timeout: seconds to wait for the other workers; None waits as long as they are alive.
            operation: what this worker does, the same on every worker: "is in fit (epoch 3)". After a line
                break, it may name this exchange. Without it, nothing is compared.

        Raises:
            OperationMismatchError: another worker is at another operation.
            PeerMissingError: a worker is lost, or did not call it in time.
            AuthenticationError: a frame in a worker's name was not signed by that worker.
        """
        deadline = self._clock.deadline(timeout)
        with self._changed:
            number, self._round = self._round, self._round + 1
            if operation:
                self._operations.begin(number, operation.encode())
            if self.rank == 0:
                self._collect(0, number, value)
            else:
                self._send(0, _VALUE, number, value)
            while number not in self._complete:
                self._operations.raise_if_unequal()
                self._lost.raise_if_any(0.0)
                if deadline.passed() and (missing := self._who_is_missing(number)):
                    self._abandoned.add(number)
                    raise _late(missing, timeout or 0.0)
                self._wait(deadline)
            return self._complete.pop(number)

    def check(self) -> None:
        """Returns if all workers may still come; called about once a second while this one waits in a step.

        Raises:
            PeerMissingError: a worker was lost at least 5 s ago, or an error has ended its operation.
            OperationMismatchError: another worker is at another operation.
            AuthenticationError: a frame in a worker's name was not signed by that worker.
        """
        with self._changed:
            if self._round <= _LAST_ROUND:  # else this worker's program ends
                self._operations.wait(self._round)
            self.check_alive()

    def check_alive(self) -> None:
        """As `check`, while this worker does what the others need not wait for, such as connecting to them.

        Those that have done so may be at a later operation already.
        """
        with self._changed:
            self._operations.raise_if_unequal()
            self._lost.raise_if_any(_GRACE)

    def explain_difference(self) -> None:
        """Called if this worker has found another one at another operation than its own.

        Returns if the first worker does not say which within two seconds.

        Raises:
            OperationMismatchError, PeerMissingError: as `check`.
        """
        deadline = self._clock.deadline(_ANSWER)
        with self._changed:
            self._operations.wait(self._round, differs=True)
            while not deadline.passed():
                self._operations.raise_if_unequal()
                self._wait(deadline)

    def operation(self) -> int:
        """How many operations this worker has begun, as a number of 23 bits."""
        return self._round % (1 << _OPERATION_BITS)

    def abort_steps_with(self, abort: Callable[[str], None]) -> None:
        """Has this worker's steps aborted where they cannot call `check` while they wait for the others.

        Args:
            abort: ends the wait with an error; called in another thread, with the reason.
        """
        with self._changed:
            self._operations.on_unequal = abort
            self._aborts = True

    def inside_step(self, inside: bool) -> None:
        """Notes that this worker begins or ends a step, for `abort_steps_with`."""
        self._inside = self._clock.now() if inside else None

    def raise_if_unequal(self) -> None:
        """As `check`, without losses."""
        with self._changed:
            self._operations.raise_if_unequal()

    def open_loop(self, loop: int) -> None:
        """Notes that a loop begins whose end the workers agree on; its number is that of its operation."""
        with self._changed:
            self._stops.open(loop)

    def close_loop(self, loop: int) -> None:
        """Notes that a loop has ended."""
        with self._changed:
            self._stops.close(loop)

    def begin_call(self, loop: int) -> bool:
        """Begins the next call of a loop, unless the workers have agreed to stop before it.

        Returns:
            Whether it begins.

        Raises:
            PeerMissingError, OperationMismatchError, AuthenticationError: as `check`.
        """
        with self._changed:
            self._await_last_call(loop)
            if self._stops.is_over(loop):
                return False
            self._stops.begin_call(loop)
            return True

    def stop(self, loop: int) -> None:
        """Asks all workers to stop a loop; returns when it is known which call is the last one.

        Raises:
            PeerMissingError, OperationMismatchError, AuthenticationError: as `check`.
        """
        with self._changed:
            self._stops.ask(loop)
            self._await_last_call(loop, asked=True)

    def send_to_first(self, note: bytes) -> None:
        """Sends a note to the first worker, and does not wait; it arrives before this worker's next value."""
        with self._changed:
            self._send(0, _NOTE, 0, note)

    def receive_notes(self) -> list[tuple[int, bytes]]:
        """On the first worker: the notes that have come since the last call, each with its worker."""
        with self._changed:
            notes = [*self._notes]
            self._notes.clear()
            return notes

    def leave(self) -> None:
        """Waits until all workers end their programs, for at most five seconds.

        What this worker sent last, for example by MPI, can be lost at its end while a peer waits for it.
        """
        with contextlib.suppress(PeerMissingError, OperationMismatchError, AuthenticationError):
            self.begin(operations.ENDED)
            self._round = _LAST_ROUND
            if self._links and not self._lost:
                self.all_gather(b"", _LEAVE)

    def _check_liveness(self) -> None:
        super()._check_liveness()
        inside = self._inside
        if self._aborts and inside is not None and self._clock.now() - inside >= _LONG_STEP:
            self._operations.wait(self._round)

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

    def _await_last_call(self, loop: int, *, asked: bool = False) -> None:
        """Waits while a worker wants to stop and the last call is not known."""
        deadline = self._clock.deadline(None)
        while self._stops.is_pending(loop) or (asked and not self._stops.is_known(loop)):
            self._operations.wait(self._round)
            self._operations.raise_if_unequal()
            self._lost.raise_if_any(0.0)
            self._wait(deadline)

    def _collect(self, worker: int, number: int, value: bytes) -> None:
        """On the first worker: keeps a value, and sends all values of its round when they are complete."""
        values = self._values.setdefault(number, {})
        values[worker] = value
        if len(values) < self.size or self._operations.unequal:
            return
        everyone = [values[rank] for rank in range(self.size)]
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

    def _receive_from(self, worker: int, kind: int, number: int, body: bytes) -> None:
        if kind == _VALUE and self.rank == 0:
            self._collect(worker, number, body)
        elif kind == _NOTE and self.rank == 0:
            self._notes.append((worker, body))
        elif kind == _MISSING and self.rank == 0:
            missing = self._who_is_missing(number)
            self._send(worker, _MISSING, number, b" ".join(b"%d" % peer for peer in missing))
        elif kind == _MISSING:
            self._missing[number] = [int(text) for text in body.split()]
        elif kind == _ALL:
            self._keep(number, split(body, self.size))
        elif kind in operations.KINDS:
            self._operations.receive(worker, kind, number, body)
        elif kind in stops.KINDS:
            self._stops.receive(worker, kind, number, body)


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


def check_alive() -> None:
    """As `Peers.check_alive`, of the connected peers; returns if there are none."""
    if _current is not None:
        _current[1].check_alive()


def _end() -> None:
    # The connections stay open: whoever waits for this worker must not end before this process.
    if _current is not None:
        if not mpi_start.failed():  # others may wait for a worker that failed
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
mpi_start.before_leaving(_close)  # MPI waits for ranks that may wait for this one
os.register_at_fork(after_in_child=_close_in_child)
