"""Accepts connections, and hands on those whose other end has proved that it knows the secret.

It reads from all connections at the same time, each with a short time limit, so that unknown clients that
send nothing, garbage, or many connections do not delay the others. Nothing is told to them.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.log import logger
from dtrain.base.tcp import accept
from dtrain.process_group.proof import Handshake

_PATIENCE = 2.0  # seconds within which a connection must prove that it knows the secret
_MOST_UNAUTHENTICATED = 64  # connections without a proof that may be open; beyond that, the oldest are closed
_CHECK_INTERVAL = 0.2  # seconds between two checks of silent connections


@dataclass
class _PendingConnection:
    sock: socket.socket
    handshake: Handshake
    until: Deadline


class Acceptor:
    """Accepts connections until `stop` is called.

    Args:
        listeners: listening sockets; the caller closes them, after `run` has returned.
        handshake: makes this end's part of the handshake with a new connection.
        on_peer: gets each connection whose other end has proved that it knows the secret, with the handshake;
            the connection is its own from then on.
        clock: the clock of all time limits.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handshake: Callable[[], Handshake],
        on_peer: Callable[[socket.socket, Handshake], None],
        clock: Clock = REAL,
    ) -> None:
        self._listeners = {sock.fileno(): sock for sock in listeners}
        self._handshake = handshake
        self._on_peer = on_peer
        self._clock = clock
        self._pending: dict[int, _PendingConnection] = {}  # the oldest first
        self._stopping, self._stop = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self._stopping, select.POLLIN)
        for sock in listeners:
            sock.setblocking(False)
            self._poll.register(sock, select.POLLIN)

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.close()

    def run(self) -> None:
        """Accept connections until `stop` is called, or a listener is closed."""
        try:
            while self._serve():
                self._close_old()
        except OSError:
            pass  # a listener is closed
        finally:
            for connection in list(self._pending.values()):
                self._close(connection)
            self._stopping.close()

    def _serve(self) -> bool:
        for number, _ in self._poll.poll(_CHECK_INTERVAL * 1000):
            if number == self._stopping.fileno():
                return False
            if number in self._listeners:
                self._accept(self._listeners[number])
            elif number in self._pending:
                self._receive(self._pending[number])
        return True

    def _accept(self, listener: socket.socket) -> None:
        sock = accept(listener, lambda line: logger.warning("While workers connect, %s", line), self._clock)
        if sock is None:
            self._close_old(most=len(self._pending) - 1)
            return
        sock.setblocking(False)
        until = self._clock.deadline(_PATIENCE)
        self._pending[sock.fileno()] = _PendingConnection(sock, self._handshake(), until)
        self._poll.register(sock, select.POLLIN)

    def _receive(self, connection: _PendingConnection) -> None:
        handshake = connection.handshake
        try:
            answer = handshake.receive(connection.sock.recv(handshake.wanted))
            connection.sock.sendall(answer)  # the empty send buffer takes it
        except BlockingIOError:
            return
        except OSError:  # the other end does not know the secret, or is gone
            self._close(connection)
            return
        if handshake.proved:
            self._unregister(connection)
            self._on_peer(connection.sock, handshake)

    def _close_old(self, most: int = _MOST_UNAUTHENTICATED) -> None:
        pending = list(self._pending.values())
        for index, connection in enumerate(pending):
            if connection.until.passed() or index < len(pending) - max(0, most):
                self._close(connection)

    def _close(self, connection: _PendingConnection) -> None:
        self._unregister(connection)
        with contextlib.suppress(OSError):
            connection.sock.close()

    def _unregister(self, connection: _PendingConnection) -> None:
        number = connection.sock.fileno()
        self._poll.unregister(number)
        del self._pending[number]
