"""Accepts and authenticates the connections of the workers that connect to this one, and refuses all others.

It reads from all connections at the same time, each with a short time limit, so that unknown clients that
send nothing do not delay workers. Connecting to other workers is done in `connect`.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.clock import REAL, Clock, Deadline
from dtrain.cluster.sockets import accept
from dtrain.log import logger

SECRET = 32  # bytes
HELLO = struct.Struct(f"!I{SECRET}s")
_PATIENCE = 2.0  # seconds within which a connection must send its hello
_MOST_UNAUTHENTICATED = 64  # connections without a hello that may be open; beyond that, the oldest are closed
_CHECK_INTERVAL = 0.2  # seconds between two checks of the deadline and of silent connections


@dataclass
class _PendingConnection:
    sock: socket.socket
    hello_until: Deadline
    received: bytes = b""


class Acceptor:
    """Waits until the expected workers have connected.

    Args:
        listeners: listening sockets; the caller closes them.
        awaited: the numbers of the expected workers.
        secret: the secret that each of them must prove to know.
        clock: the clock of all time limits.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], awaited: set[int], secret: bytes, clock: Clock = REAL
    ) -> None:
        self._listeners = {sock.fileno(): sock for sock in listeners}
        self._awaited = set(awaited)
        self._secret = secret
        self._clock = clock
        self._pending: dict[int, _PendingConnection] = {}  # the oldest first
        self._poll = select.poll()
        for sock in listeners:
            sock.setblocking(False)
            self._poll.register(sock, select.POLLIN)

    def run(self, found: dict[int, socket.socket], deadline: Deadline) -> None:
        """Puts each worker's connected socket into `found`, until all are connected or the time is over.

        Args:
            found: the sockets by worker; filled here.
            deadline: when to stop.
        """
        try:
            while self._awaited and not deadline.passed():
                for number, _ in self._poll.poll(_CHECK_INTERVAL * 1000):
                    if number in self._listeners:
                        self._accept(self._listeners[number])
                    elif number in self._pending:
                        self._receive(self._pending[number], found)
                self._close_old()
        except OSError:
            pass  # the listeners are closed: the time is over
        finally:
            for connection in list(self._pending.values()):
                self._close(connection)

    def _accept(self, listener: socket.socket) -> None:
        sock = accept(listener, lambda line: logger.warning("While workers connect, %s", line), self._clock)
        if sock is None:
            self._close_old(most=len(self._pending) - 1)
            return
        sock.setblocking(False)
        self._pending[sock.fileno()] = _PendingConnection(sock, self._clock.deadline(_PATIENCE))
        self._poll.register(sock, select.POLLIN)

    def _receive(self, connection: _PendingConnection, found: dict[int, socket.socket]) -> None:
        try:
            more = connection.sock.recv(HELLO.size - len(connection.received))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        connection.received += more
        if not more:
            self._close(connection)
        elif len(connection.received) == HELLO.size:
            worker = self._authenticate(connection)
            if worker is None:
                self._close(connection)
            else:
                self._unregister(connection)
                self._awaited.discard(worker)
                found[worker] = connection.sock

    def _authenticate(self, connection: _PendingConnection) -> int | None:
        """Answers a valid hello with a proof that this worker knows the secret, too.

        Returns:
            The number of the worker; None if the hello is not valid, or the worker is not expected.
        """
        worker, received = HELLO.unpack(connection.received)
        if (
            not hmac.compare_digest(received, proof(self._secret, "hello", worker))
            or worker not in self._awaited
        ):
            return None
        try:
            connection.sock.sendall(proof(self._secret, "welcome", worker))  # the empty send buffer takes it
        except OSError:
            return None
        return int(worker)

    def _close_old(self, most: int = _MOST_UNAUTHENTICATED) -> None:
        pending = list(self._pending.values())
        for place, connection in enumerate(pending):
            if connection.hello_until.passed() or place < len(pending) - max(0, most):
                self._close(connection)

    def _close(self, connection: _PendingConnection) -> None:
        self._unregister(connection)
        connection.sock.close()

    def _unregister(self, connection: _PendingConnection) -> None:
        number = connection.sock.fileno()
        self._poll.unregister(number)
        del self._pending[number]


def proof(secret: bytes, message: str, worker: int) -> bytes:
    """A proof of knowing the secret that does not reveal it: an HMAC-SHA256 of the message and the worker."""
    return hmac.digest(secret, f"{message} {worker}".encode(), "sha256")
