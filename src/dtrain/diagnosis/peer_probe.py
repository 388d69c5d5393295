"""Connects the `dtrain doctor` processes of a job, at the addresses of TF_CONFIG, and measures between them.

Every process is a server for its peers and a client of each. Both ends prove that they have the job's secret
before anything else is sent or read. `peer_checks` evaluates the results.
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.tcp import bind_everywhere, split_address
from dtrain.environments.topology import Task, Topology
from dtrain.process_group.acceptor import Acceptor
from dtrain.process_group.proof import Handshake, introduce
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import SignedFrames

_BLOCK = 1 << 20  # the most bytes to receive at once
_ANSWER = 10.0  # seconds within which a peer must answer a message
_CONNECT = 3.0  # seconds within which a host must answer a connection attempt
_EXCHANGE_SECONDS = 30.0  # seconds that all messages with one peer may take
_PURPOSE = "doctor"
# Which task answers at an address is what the probe finds out: it says so in its facts, which are signed.
_ANY = "any task"
_PINGS = 20
_SMALL, _LARGE = 1 << 20, 32 << 20  # bytes sent to measure bandwidth
_FAST = 0.05  # seconds; if the small message takes less, the large one is sent too
_PAUSE = 0.2


class ProbeError(Exception):
    """A peer does not follow the protocol, so it is no `dtrain doctor` of this job."""


_FAULTS = (
    OSError, ProbeError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""The errors of an exchange if the network fails, or if the peer sends a malformed message."""


@dataclass
class PeerResult:
    """What a process has found out about a peer.

    Attributes:
        problem: why no messages were exchanged; "" if they were.
        answers: whether the peer's host answers a connection attempt, if only by a refusal.
        facts: the facts that the peer has sent about itself.
        latency: seconds of half a round trip, the median.
        bandwidth: bits a second towards the peer.
        clock: seconds by which the peer's clock is ahead.
    """

    problem: str = "it has not answered"
    answers: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    latency: float = 0.0
    bandwidth: float = 0.0
    clock: float = 0.0


def handshake_with_peer(secret: Secret, task: Task) -> Handshake:
    """The proof of a task that has connected to a peer."""
    return Handshake(secret, _PURPOSE, str(task), _ANY)


def handshake_of_peer(secret: Secret) -> Handshake:
    """The proof of a task that has accepted a connection."""
    return Handshake(secret, _PURPOSE, _ANY)


class Channel:
    """Sends and receives messages on one connection, in turns.

    Args:
        sock: the connection.
        handshake: its handshake, which has succeeded.
        deadline: until when messages may be exchanged.
    """

    def __init__(self, sock: socket.socket, handshake: Handshake, deadline: Deadline) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._deadline = sock, deadline
        self._frames = SignedFrames(handshake.key, connected=handshake.connected)

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes without a signature."""
        self._sock.settimeout(_time_for_an_answer(self._deadline))
        self._sock.sendall(data)

    def receive_bytes(self, most: int) -> bytes:
        """Receives bytes without a signature, at least one.

        Raises:
            ProbeError: the peer has ended the connection, or the time of the exchange is over.
        """
        # Limited at each read, because a peer that sends byte by byte never exceeds a socket's timeout.
        self._sock.settimeout(_time_for_an_answer(self._deadline))
        if not (data := self._sock.recv(most)):
            raise ProbeError("it ended the connection")
        return data

    def send(self, kind: str, /, **content: Any) -> None:
        """Sends a message."""
        self.send_bytes(self._frames.encode_message(kind, **content))

    def receive(self) -> dict[str, Any]:
        """Receives a message.

        Raises:
            ForgedFrameError: the peer has not signed the message, or does not follow the protocol.
            ProbeError: as `receive_bytes`.
        """
        while True:
            for message in self._frames.decode_messages(self.receive_bytes(_BLOCK)):
                return message


class PeerProbe:
    """This process' part in the probe of all peers.

    Args:
        topology: the job.
        secret: the job's secret.
        facts: what this process sends its peers about itself, as values that JSON can hold.
        clock: decides how long peers are awaited.

    Raises:
        OSError: this task's port is in use.
    """

    def __init__(
        self, topology: Topology, secret: Secret, facts: dict[str, Any], *, clock: Clock = REAL
    ) -> None:
        self._topology, self._secret, self._clock = topology, secret, clock
        self._facts = facts | {"task": str(topology.task)}
        self._done: set[str] = set()
        self._measuring = threading.Lock()  # simultaneous measurements would share the bandwidth
        self._listener = bind_everywhere(split_address(topology.address)[1])
        try:
            self._listener.listen(64)
        except OSError:
            self._listener.close()
            raise
        # Only connections with a proof get a thread, so strangers cannot occupy threads.
        self._acceptor = Acceptor(
            [self._listener], lambda: handshake_of_peer(secret), self._start_serving, clock
        )
        self._accepting = threading.Thread(target=self._acceptor.run, daemon=True)
        self._accepting.start()

    def __enter__(self) -> PeerProbe:
        return self

    def __exit__(self, *error: object) -> None:
        self._acceptor.stop()
        self._accepting.join()
        self._listener.close()

    def run(self, seconds: float) -> dict[Task, PeerResult]:
        """Exchanges messages with every other task, for at most `seconds` and one last attempt."""
        deadline = self._clock.deadline(seconds)
        last = self._clock.deadline(seconds + _ANSWER)
        tasks = self._topology.tasks()
        after = tasks.index(self._topology.task) + 1  # each task begins with the peer after it
        others = [*tasks[after:], *tasks[: after - 1]]
        peers = {task: PeerResult() for task in others}
        threads = [
            threading.Thread(target=self._probe, args=(task, peer, deadline), daemon=True)
            for task, peer in peers.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reached = {str(task) for task, peer in peers.items() if not peer.problem}
        while not reached <= self._done and not last.passed():
            self._clock.sleep(_PAUSE)
        return peers

    def _probe(self, task: Task, peer: PeerResult, deadline: Deadline) -> None:
        while True:
            try:
                with connected(self._topology.address_of(task), peer):
                    pass  # a probe without the lock, so that a host that does not answer blocks no other peer
                with (
                    self._measuring,
                    connected(self._topology.address_of(task), peer) as connection,
                    _limited(self._clock) as limit,
                ):
                    handshake = handshake_with_peer(self._secret, self._topology.task)
                    introduce(connection, handshake, Deadline(self._clock, self._clock.now() + _ANSWER))
                    self._measure(Channel(connection, handshake, limit), peer)
                peer.problem = ""
                return
            except _FAULTS as error:
                peer.problem = getattr(error, "strerror", None) or str(error) or "it does not answer"
            if deadline.passed():
                return
            self._clock.sleep(_PAUSE)

    def _measure(self, channel: Channel, peer: PeerResult) -> None:
        channel.send("facts", **self._facts)
        peer.facts = channel.receive()
        trips, clocks = [], []
        for _ in range(_PINGS):
            begun, clock = time.perf_counter(), time.time()
            channel.send("ping")
            answer = channel.receive()
            trips.append(time.perf_counter() - begun)
            theirs = float(answer["time"])
            if not math.isfinite(theirs):
                raise ProbeError("it sent a time that is not finite")
            clocks.append(theirs - clock - trips[-1] / 2)
        peer.latency, peer.clock = statistics.median(trips) / 2, statistics.median(clocks)
        for size in (_SMALL, _LARGE):
            channel.send("bytes", count=size)
            channel.receive()  # from here on, the peer receives bytes
            begun = time.perf_counter()
            channel.send_bytes(bytes(size))
            channel.receive()
            took = time.perf_counter() - begun
            peer.bandwidth = size * 8 / took
            if took > _FAST:
                break
        channel.send("done")
        channel.receive()

    def _start_serving(self, connection: socket.socket, handshake: Handshake) -> None:
        threading.Thread(target=self._serve, args=(connection, handshake), daemon=True).start()

    def _serve(self, connection: socket.socket, handshake: Handshake) -> None:
        with connection, contextlib.suppress(*_FAULTS), _limited(self._clock) as limit:
            channel = Channel(connection, handshake, limit)
            channel.receive()  # its facts
            channel.send("facts", **self._facts)
            while True:
                message = channel.receive()
                if message["dtrain"] == "bytes":
                    channel.send("ready")
                    left = min(int(message["count"]), _LARGE)
                    while left > 0:
                        left -= len(channel.receive_bytes(min(left, _BLOCK)))
                channel.send("time", time=time.time())
                if message["dtrain"] == "done":
                    self._done.add(handshake.peer)
                    return


def _time_for_an_answer(deadline: Deadline) -> float:
    """The seconds that the peer has for an answer.

    Raises:
        ProbeError: the time of the exchange is over.
    """
    if deadline.passed():
        raise ProbeError(f"the exchange took more than {_EXCHANGE_SECONDS:g} s")
    return min(_ANSWER, max(1e-3, deadline.left()))


@contextlib.contextmanager
def _limited(clock: Clock) -> Iterator[Deadline]:
    """Gives the deadline of an exchange.

    Raises:
        ProbeError: the exchange was not over then.
    """
    deadline = clock.deadline(_EXCHANGE_SECONDS)
    try:
        yield deadline
    except OSError:  # the last answer was awaited until the deadline
        _time_for_an_answer(deadline)
        raise


@contextlib.contextmanager
def connected(address: str, peer: PeerResult) -> Iterator[socket.socket]:
    """Connect to a `host:port`; notes in `peer` whether the host answers, if only by a refusal.

    Raises:
        OSError: no connection could be made.
    """
    try:
        connection = socket.create_connection(split_address(address), timeout=_CONNECT)
    except ConnectionRefusedError:
        peer.answers = True
        raise
    except OSError:
        peer.answers = False
        raise
    peer.answers = True
    with connection:
        yield connection
