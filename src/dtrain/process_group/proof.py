"""The mutual proof by which two processes show each other that both know the job's secret.

All connections that need a proof make it here: the rendezvous, the sockets of the reductions, and `dtrain
doctor`. This module computes what to send and judges what has come; except for `introduce`, the callers send
and receive.

The messages of a handshake, each of a known size:

1. The end that has connected sends its challenge: 32 random bytes. Until then, the other end is silent.
2. The end that has accepted sends its own challenge.
3. The end that has connected sends its name and its proof.
4. The end that has accepted checks the proof, and only then sends its own.

A proof is an HMAC of the purpose of the connection, and of the side, the name and the challenge of the prover
and of the verifier. So it holds for one connection, one purpose, one direction and one verifier.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass

from dtrain.base.clock import Deadline
from dtrain.process_group.secret import SIZE, Secret

_CHECK_SECONDS = 0.5  # seconds between two calls of `while_waiting`

_Steps = Generator[tuple[bytes, int], bytes, bytes]


class ProofError(OSError):
    """The other end has not proved that it knows the secret. The connection must be closed."""


@dataclass(frozen=True)
class ConnectionEnd:
    """One end of a connection.

    Attributes:
        side: "connected" or "accepted".
        name: the name of its process in the job.
        challenge: the random bytes that it has sent.
    """

    side: str
    name: str
    challenge: bytes


def proof(secret: Secret, purpose: str, prover: ConnectionEnd, verifier: ConnectionEnd) -> bytes:
    """The proof that `prover` knows the secret, for `verifier` alone: an HMAC-SHA256."""
    ends = (part for end in (prover, verifier) for part in (end.side, end.name, end.challenge))
    return secret.sign("proof", purpose, *ends)


class Handshake:
    """One end's part of the mutual proof on one connection; it holds a few hundred bytes at most.

    Args:
        secret: what both ends must know.
        purpose: what the connection is for; the same at both ends.
        name: this end's name, at most 255 bytes.
        peer: at the end that has connected, the name of the process that must answer. None at the end that
            has accepted: the other end says who it is.

    Attributes:
        first: what this end sends at once; b"" for nothing.
        wanted: the number of bytes to receive next. The caller receives no more than these, so what follows
            the handshake stays in the socket.
        peer: the name of the other end; before the proof, it is what that end claims.
    """

    def __init__(self, secret: Secret, purpose: str, name: str, peer: str | None = None) -> None:
        self._secret, self._purpose, self._name = secret, purpose, name
        self._challenge = secrets.token_bytes(SIZE)
        self._inbox = b""
        self.connected = peer is not None
        self.peer = peer or ""
        self._key: Secret | None = None
        self._steps = self._connecting() if self.connected else self._accepting()
        self.first, self.wanted = next(self._steps)

    @property
    def proved(self) -> bool:
        """Whether the other end has proved that it knows the secret."""
        return self._key is not None

    @property
    def key(self) -> Secret:
        """A secret of this connection, which only both ends know.

        Raises:
            RuntimeError: the other end has not proved that it knows the job's secret.
        """
        if self._key is None:
            raise RuntimeError("the handshake is not over")
        return self._key

    def receive(self, data: bytes) -> bytes:
        """Take received bytes, at most `wanted`; returns what to send.

        Raises:
            ProofError: the other end does not know the secret, or has closed the connection (`data` is b"").
        """
        if not data:
            raise ProofError("it closed the connection before it proved that it knows this job's secret")
        self._inbox += data
        self.wanted -= len(data)
        if self.wanted:
            return b""
        message, self._inbox = self._inbox, b""
        try:
            answer, self.wanted = self._steps.send(message)
        except StopIteration as end:
            return bytes(end.value)
        return answer

    def _connecting(self) -> _Steps:
        theirs = yield self._challenge, SIZE
        own, peer = (
            ConnectionEnd("connected", self._name, self._challenge),
            ConnectionEnd("accepted", self.peer, theirs),
        )
        name = self._name.encode()
        answer = yield bytes([len(name)]) + name + self._proof(own, peer), SIZE
        self._check(answer, peer, own)
        self._agree(own, peer)
        return b""

    def _accepting(self) -> _Steps:
        theirs = yield b"", SIZE
        (length,) = yield self._challenge, 1
        answer = yield b"", length + SIZE
        self.peer = answer[:length].decode("utf-8", "replace")
        own, peer = (
            ConnectionEnd("accepted", self._name, self._challenge),
            ConnectionEnd("connected", self.peer, theirs),
        )
        self._check(answer[length:], peer, own)
        self._agree(peer, own)
        return self._proof(own, peer)

    def _proof(self, prover: ConnectionEnd, verifier: ConnectionEnd) -> bytes:
        return proof(self._secret, self._purpose, prover, verifier)

    def _check(self, found: bytes, prover: ConnectionEnd, verifier: ConnectionEnd) -> None:
        if not secrets.compare_digest(found, self._proof(prover, verifier)):
            raise ProofError("it did not prove that it knows this job's secret")

    def _agree(self, connected: ConnectionEnd, accepted: ConnectionEnd) -> None:
        ends = (part for end in (connected, accepted) for part in (end.name, end.challenge))
        self._key = self._secret.derive("connection", self._purpose, *ends)


def introduce(
    sock: socket.socket,
    handshake: Handshake,
    deadline: Deadline,
    while_waiting: Callable[[], None] = lambda: None,
) -> None:
    """Carry out a handshake on a connected socket, and wait for the other end.

    Args:
        sock: the socket; its time limit is changed.
        handshake: this end's part.
        deadline: when to give up.
        while_waiting: called about twice a second; what it raises ends the wait.

    Raises:
        ProofError: the other end does not know the secret, or has closed the connection.
        TimeoutError: it has not proved that it knows the secret when the time is over.
        OSError: the connection is lost.
    """
    sock.settimeout(_CHECK_SECONDS)
    sock.sendall(handshake.first)
    while not handshake.proved:
        if deadline.passed():
            raise TimeoutError("it did not prove in time that it knows this job's secret")
        sock.settimeout(min(_CHECK_SECONDS, max(0.01, deadline.left())))
        with contextlib.suppress(TimeoutError):
            sock.sendall(handshake.receive(sock.recv(handshake.wanted)))
        while_waiting()
