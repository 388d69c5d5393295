"""Accepts connections, and hands on those whose other end has proved that it knows the secret, or said hello.

It reads from all connections at the same time, each with a short time limit, so that unknown clients that
send nothing, garbage, or many connections do not delay the others. Nothing is told to them.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.log import logger
from dtrain.base.tcp import accept
from dtrain.process_group.proof import ProofError

MOST_PENDING = 64
"""Connections that may be open before their introduction is complete."""

_CHECK_INTERVAL = 0.2  # seconds between two checks of silent connections


class Introduction(Protocol):
    """What the other end of a new connection must send first; a `Handshake` is one."""

    @property
    def wanted(self) -> int:
        """The most bytes to receive next."""

    @property
    def proved(self) -> bool:
        """Whether all has come."""

    def receive(self, data: bytes) -> bytes:
        """As `Handshake.receive`; any OSError closes the connection."""


AnIntroduction = TypeVar("AnIntroduction", bound=Introduction)


class Acceptor(Generic[AnIntroduction]):
    """Accepts connections, in a thread by `run`, or in the caller's loop by `serve`.

    Args:
        listeners: listening sockets; the caller closes them, after `close` or the end of `run`.
        introduction: makes this end's part of the introduction of a new connection.
        on_peer: gets each connection whose introduction is complete, with the introduction; the connection
            is its own from then on, and does not block.
        clock: the clock of all time limits.
        on_refused: gets the introduction of each connection whose other end has sent a wrong proof.
        log: gets a line if the system has no free descriptor.
        patience: seconds within which an introduction must be complete.
        most: how many incomplete ones may be open; beyond that, the oldest connections are closed.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        introduction: Callable[[], AnIntroduction],
        on_peer: Callable[[socket.socket, AnIntroduction], None],
        clock: Clock = REAL,
        *,
        on_refused: Callable[[AnIntroduction], None] = lambda introduction: None,
        log: Callable[[str], None] = lambda line: logger.warning("While workers connect, %s", line),
        patience: float = 2.0,
        most: int = MOST_PENDING,
    ) -> None:
        self._introduction = introduction
        self._on_peer = on_peer
        self._clock = clock
        self._on_refused = on_refused
        self._log = log
        self._patience = patience
        self._most = most
        self._pending: dict[socket.socket, Deadline] = {}  # the oldest first
        self._stopped, self._stop = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in listeners:
            self.watch(sock, partial(self._accept, sock))

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.close()

    def run(self) -> None:
        """Accept connections until `stop` is called."""
        running = [True]
        self.watch(self._stopped, running.clear)
        try:
            while running:
                self.serve()
        finally:
            self.close()

    def serve(self, seconds: float = _CHECK_INTERVAL) -> None:
        """Take what comes within so many seconds, and within 0.2 s, so that old connections are closed."""
        for key, _ in self._selector.select(min(seconds, _CHECK_INTERVAL)):
            if self._selector.get_map().get(key.fd) is key:  # an earlier event may have closed it
                key.data()
        self._close_old(self._most)

    def watch(self, sock: socket.socket, on_data: Callable[[], None]) -> None:
        """Have `serve` also call a function when a socket can be read; the socket is made non-blocking."""
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, data=on_data)

    def forget(self, sock: socket.socket) -> None:
        """End a `watch`."""
        self._selector.unregister(sock)

    def close(self) -> None:
        """Close the connections whose introduction is not complete."""
        self._close_old(0)
        self._selector.close()
        self._stopped.close()
        self._stop.close()

    def _accept(self, listener: socket.socket) -> None:
        sock = accept(listener, self._log, self._clock)
        if sock is None:
            self._close_old(max(0, len(self._pending) - 1))
            return
        self._pending[sock] = self._clock.deadline(self._patience)
        self.watch(sock, partial(self._receive, sock, self._introduction()))

    def _receive(self, sock: socket.socket, introduction: AnIntroduction) -> None:
        data = b""
        try:
            data = sock.recv(introduction.wanted)
            sock.sendall(introduction.receive(data))  # the empty send buffer takes it
        except BlockingIOError:
            return
        except OSError as error:  # the other end does not know the secret, or is gone
            self._take(sock).close()
            if data and isinstance(error, ProofError):
                self._on_refused(introduction)
            return
        if introduction.proved:
            self._on_peer(self._take(sock), introduction)

    def _close_old(self, most: int) -> None:
        excess = len(self._pending) - most
        for index, (sock, until) in enumerate([*self._pending.items()]):
            if index < excess or until.passed():
                self._take(sock).close()

    def _take(self, sock: socket.socket) -> socket.socket:
        self.forget(sock)
        del self._pending[sock]
        return sock
