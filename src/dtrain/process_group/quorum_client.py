"""A worker's connection to the server of the rounds (`quorum_server.py`), in a job with a quorum."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.base.clock import REAL, Clock
from dtrain.base.tcp import split_address
from dtrain.errors import ConfigurationError, PeerMissingError
from dtrain.process_group.plain_values import NotPlainError, decode, encode
from dtrain.process_group.proof import Handshake, introduce
from dtrain.process_group.quorum_messages import (
    PURPOSE,
    SERVER,
    Agreed,
    Answer,
    AskState,
    Begin,
    Contribute,
    EndFit,
    Give,
    Join,
    JoinRefused,
    Logs,
    Mean,
    Meet,
    MessageSocket,
    Met,
    Over,
    Take,
)
from dtrain.process_group.secret import Secret

_PATIENCE = 30.0  # seconds in which the server proves that it knows the secret

Given = tuple[int, str, bytes]
"""The number of a round, a text about its beginning, and the bytes of the variables then."""


@dataclass(frozen=True)
class JoinedRound:
    """With what a worker takes part in a `fit`.

    Attributes:
        round: the number of the round that begins; None if the `fit` is over.
        about: the text of the state to take; None to begin with what this worker has.
        content: the bytes of that state.
    """

    round: int | None
    about: str | None = None
    content: bytes = b""


@dataclass(frozen=True)
class RoundMean:
    """The mean of a round.

    Attributes:
        vector: the mean.
        members: how many workers have contributed.
        rows: the sum of their examples.
        give: whether this worker must give its state before its next step.
        first: whether this worker is the first one of them.
    """

    vector: np.ndarray
    members: int
    rows: int
    give: bool
    first: bool


class QuorumClient:
    """This worker's part of the rounds.

    Args:
        address: the server's.
        secret: the job's.
        rank: this worker's number.
        size: the number of workers.
        clock: the clock of the time limit of connecting.

    Attributes:
        rank, size: as given.
        in_fit: whether a `fit` runs.

    Raises:
        PeerMissingError: the server cannot be reached.
    """

    def __init__(self, address: str, secret: Secret, rank: int, size: int, clock: Clock = REAL) -> None:
        self.rank, self.size = rank, size
        self.in_fit = False
        self._fits = 0  # fits of this process that have begun
        self._meetings = 0  # broadcasts and barriers that it has made
        try:
            sock = _connected(address)
            handshake = Handshake(secret, PURPOSE, f"worker {rank}", SERVER)
            introduce(sock, handshake, clock.deadline(_PATIENCE))
        except OSError as error:
            raise _lost(error) from error
        self._link = MessageSocket(sock, handshake.key, Answer, connected=True)

    def meet(self, value: Any, call: str) -> Any:
        """A `broadcast` or `barrier`: the value that the first worker gave when it came here first.

        Raises:
            ConfigurationError: it is called in `fit`, where a worker that was started again would count
                others; the value is not plain; or the first worker is gone.
        """
        if self.in_fit:
            raise ConfigurationError(
                f"{call} was called in fit, in a job with a quorum, whose workers come and go.",
                hint="call it before or after fit",
            )
        try:
            text = encode(value)
        except NotPlainError as error:
            raise ConfigurationError(
                f"{call} was given a value that cannot be sent in a job with a quorum: {error}.",
                hint="give numbers, text, arrays, and containers of them",
            ) from None
        number, self._meetings = self._meetings, self._meetings + 1
        answer, _ = self._ask(Meet(number, text, call == "barrier"))
        if not isinstance(answer, Met):
            raise ConfigurationError(
                answer.why if isinstance(answer, JoinRefused) else "The server of the rounds gave no answer.",
                hint="see why the first worker has ended",
            )
        return decode(answer.text)

    def next_fit(self) -> int:
        """The number of a `fit` that begins now in this process."""
        self.in_fit = True
        self._fits += 1
        return self._fits - 1

    def join(self, fit: int, agreed: Agreed) -> JoinedRound:
        """Waits until this worker may take part in a `fit`.

        Raises:
            ConfigurationError: it has another model or hook than the others.
            PeerMissingError: the server has ended.
        """
        answer, content = self._ask(Join(fit, agreed))
        if isinstance(answer, Begin):
            return JoinedRound(0)
        if isinstance(answer, Take):
            return JoinedRound(answer.round, answer.about, content)
        if isinstance(answer, Over):
            return JoinedRound(None, answer.about or None, content)
        raise ConfigurationError(
            answer.why if isinstance(answer, JoinRefused) else "The server of the rounds gave no answer.",
            hint="run the same program with the same settings on every worker",
        )

    def contribute(
        self, fit: int, number: int, content: bytes, rows: int, *, joinable: bool, given: Callable[[], Given]
    ) -> tuple[RoundMean | None, JoinedRound | None]:
        """Sends what this worker has changed in a round, and waits for the mean.

        Args:
            fit, number: of the `fit` and of the round.
            content: what is sent.
            rows: the examples of which it was computed.
            joinable: whether others can join after the round, or at its beginning.
            given: the state at the beginning of the round, if the server asks for it.

        Returns:
            The mean, which is of bytes here; or None, where the contribution was dropped. Then, if the `fit`
            is over, its last state follows.
        """
        answer, content = self._ask(Contribute(fit, number, rows, joinable), content)
        while isinstance(answer, AskState):
            self.give(fit, given(), answered=False)
            answer, content = self._next()
        return self._mean(answer, content, np.uint8)

    def mean_of_logs(
        self, fit: int, number: int, names: Sequence[str], values: Sequence[float], rows: int
    ) -> tuple[RoundMean | None, JoinedRound | None]:
        """As `contribute`, for the logs of an epoch, weighted by examples."""
        content = np.asarray(values, np.float64).tobytes()
        answer, received = self._ask(Logs(fit, number, rows, [*names]), content)
        return self._mean(answer, received, np.float64)

    def give(self, fit: int, state: Given, *, answered: bool = True) -> None:
        """Gives a state to the workers that wait for one."""
        number, about, content = state
        message = Give(fit, number, about)
        if answered:
            self._ask(message, content)
        else:
            self._send(message, content)

    def end(self, fit: int, state: Callable[[], Given]) -> dict[str, Any]:
        """Says that this worker has ended a `fit`; returns what the rounds have used (`QuorumReport`)."""
        answer, _ = self._ask(EndFit(fit))
        if answer.give:
            self.give(fit, state())
        found = json.loads(answer.report)
        return found if isinstance(found, dict) else {}

    def _mean(self, answer: Any, content: bytes, dtype: Any) -> tuple[RoundMean | None, JoinedRound | None]:
        if isinstance(answer, Mean):
            vector = np.frombuffer(content, dtype)
            return RoundMean(vector, answer.members, answer.rows, answer.give, answer.first), None
        over = JoinedRound(None, answer.about or None, content) if isinstance(answer, Over) else None
        return None, over

    def _ask(self, message: Any, content: bytes = b"") -> tuple[Any, bytes]:
        self._send(message, content)
        return self._next()

    def _send(self, message: Any, content: bytes) -> None:
        try:
            self._link.send(message, content)
        except OSError as error:
            raise _lost(error) from error

    def _next(self) -> tuple[Any, bytes]:
        try:
            return self._link.receive()
        except OSError as error:
            raise _lost(error) from error


def _lost(error: OSError) -> PeerMissingError:
    return PeerMissingError(
        f"This worker has lost the server of the rounds of its job: {error}.",
        hint="the launcher (dtrain launch --quorum) holds it; see why it has ended",
    )


def _connected(address: str) -> socket.socket:
    sock = socket.create_connection(split_address(address), timeout=_PATIENCE)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


_clients: dict[str, QuorumClient] = {}  # by the server's address


def connect(address: str, secret: Secret, rank: int, size: int) -> QuorumClient:
    """This process' connection to a server; of an earlier call, if it was to the same.

    Raises:
        PeerMissingError: the server cannot be reached.
    """
    if address not in _clients:
        _clients[address] = QuorumClient(address, secret, rank, size)
    return _clients[address]


def connected() -> QuorumClient | None:
    """This process' connection; None before `connect`."""
    return next(iter(_clients.values()), None)
