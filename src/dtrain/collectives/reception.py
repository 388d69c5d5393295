"""Accepts and authenticates the connections of the workers that connect to this one, and refuses all others.

It reads from all connections at the same time, each with a short time limit, so that unknown clients that
send nothing do not delay workers. Connecting to other workers is done in `connect`.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.cluster.sockets import accept
from dtrain.log import logger

SECRET = 32  # bytes
HELLO = struct.Struct(f"!I{SECRET}s")
_PATIENCE = 2.0  # seconds within which a connection must send its hello
_MOST_UNAUTHENTICATED = 64  # connections without a hello that may be open; beyond that, the oldest are closed
_LOOK = 0.2  # seconds between two checks of the deadline and of silent connections


@dataclass
class _Visitor:
    sock: socket.socket
    since: float
    said: bytes = b""


class Reception:
    """Waits until the expected workers have connected.

    Args:
        listeners: listening sockets; the caller closes them.
        awaited: the numbers of the expected workers.
        secret: the secret that each of them must prove to know.
    """

    def __init__(self, listeners: Sequence[socket.socket], awaited: set[int], secret: bytes) -> None:
        self._listeners = {sock.fileno(): sock for sock in listeners}
        self._awaited = set(awaited)
        self._secret = secret
        self._visitors: dict[int, _Visitor] = {}  # the oldest first
        self._poll = select.poll()
        for sock in listeners:
            sock.setblocking(False)
            self._poll.register(sock, select.POLLIN)

    def run(self, found: dict[int, socket.socket], deadline: float) -> None:
        """Puts each worker's connected socket into `found`, until all are connected or the time is over.

        Args:
            found: the sockets by worker; filled here.
            deadline: when to stop, by `time.monotonic`.
        """
        try:
            while self._awaited and time.monotonic() < deadline:
                for number, _ in self._poll.poll(_LOOK * 1000):
                    if number in self._listeners:
                        self._let_in(self._listeners[number])
                    elif number in self._visitors:
                        self._hear(self._visitors[number], found)
                self._close_old()
        except OSError:
            pass  # the listeners are closed: the time is over
        finally:
            for visitor in list(self._visitors.values()):
                self._close(visitor)

    def _let_in(self, listener: socket.socket) -> None:
        sock = accept(listener, lambda line: logger.warning("While workers connect, %s", line))
        if sock is None:
            self._close_old(most=len(self._visitors) - 1)
            return
        sock.setblocking(False)
        self._visitors[sock.fileno()] = _Visitor(sock, time.monotonic())
        self._poll.register(sock, select.POLLIN)

    def _hear(self, visitor: _Visitor, found: dict[int, socket.socket]) -> None:
        try:
            more = visitor.sock.recv(HELLO.size - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        visitor.said += more
        if not more:
            self._close(visitor)
        elif len(visitor.said) == HELLO.size:
            worker = self._greet(visitor)
            if worker is None:
                self._close(visitor)
            else:
                self._forget(visitor)
                self._awaited.discard(worker)
                found[worker] = visitor.sock

    def _greet(self, visitor: _Visitor) -> int | None:
        """Answers a valid hello with a proof that this worker knows the secret, too.

        Returns:
            The number of the worker; None if the hello is not valid, or the worker is not expected.
        """
        worker, said = HELLO.unpack(visitor.said)
        if not hmac.compare_digest(said, word(self._secret, "hello", worker)) or worker not in self._awaited:
            return None
        try:
            visitor.sock.sendall(word(self._secret, "welcome", worker))  # the empty send buffer takes it
        except OSError:
            return None
        return int(worker)

    def _close_old(self, most: int = _MOST_UNAUTHENTICATED) -> None:
        now = time.monotonic()
        visitors = list(self._visitors.values())
        for place, visitor in enumerate(visitors):
            if now - visitor.since > _PATIENCE or place < len(visitors) - max(0, most):
                self._close(visitor)

    def _close(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        visitor.sock.close()

    def _forget(self, visitor: _Visitor) -> None:
        number = visitor.sock.fileno()
        self._poll.unregister(number)
        del self._visitors[number]


def word(secret: bytes, said: str, worker: int) -> bytes:
    """A proof of knowing the secret that does not reveal it: an HMAC-SHA256 of the message and the worker."""
    return hmac.digest(secret, f"{said} {worker}".encode(), "sha256")
