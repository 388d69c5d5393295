"""The messages that tasks exchange in the rendezvous before training, and their authentication.

A message is one line of JSON. If the job has a secret, a connection begins with a mutual proof (`proof`), and
each side signs its lines with a key of the connection. This module opens no connection.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.environments.topology import Task
from dtrain.errors import DtrainError, PeerMismatchError, PeerMissingError, PortInUseError
from dtrain.process_group.proof import Handshake, Signer
from dtrain.process_group.secret import Secret

PROTOCOL = 3
MESSAGE_LIMIT = 1 << 20  # bytes; a cluster of ten thousand tasks is smaller
_PURPOSE = "rendezvous"
_SIGNATURE = "signature"

ERRORS: Mapping[str, Callable[..., DtrainError]] = {
    "missing": PeerMissingError,
    "mismatch": PeerMismatchError,
    "port in use": PortInUseError,
}
"""The error that every task raises for each kind of verdict other than "go"."""


@dataclass(frozen=True)
class Connection:
    """A connection that is left from the rendezvous, between the first task and another one.

    Attributes:
        sock: the connected socket.
        key: a key that only both ends know; b"" if the job has no secret.
    """

    sock: socket.socket
    key: bytes = field(repr=False)


class Verdict(Exception):  # noqa: N818 - an outcome that ends the rendezvous, not an error of the program
    """Why the rendezvous fails, or why it refuses one process; `kind` is a key of ERRORS."""

    def __init__(self, kind: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.hint = hint

    def error(self) -> DtrainError:
        """The error to raise on a task that receives this verdict."""
        return ERRORS[self.kind](self.message, hint=self.hint)


def missing_error(missing: list[str], seconds: float, refused: str = "") -> Verdict:
    """The verdict for tasks that did not come within the time limit.

    Args:
        missing: the tasks, in words.
        seconds: the time limit.
        refused: a sentence about processes that were refused, or "".
    """
    return Verdict(
        "missing",
        f"Not every process of the job has appeared after {seconds:.3g} s. Missing: {', '.join(missing)}."
        f"{' ' if refused else ''}{refused}",
        "Start all processes of the job, see why the missing ones ended or cannot be reached, "
        "or set DTRAIN_PEER_TIMEOUT to a longer time in seconds.",
    )


def mismatch(message: str) -> Verdict:
    """The verdict for processes that disagree about the job."""
    return Verdict(
        "mismatch", message, 'Give all processes the same "cluster" in TF_CONFIG, and each its own "task".'
    )


def handshake_with_first(secret: Secret, task: Task, first: str) -> Handshake:
    """The proof of a task that has connected to the first task.

    Args:
        secret: what the tasks of the job know.
        task: the task that has connected.
        first: the address to which it has connected. A proof for one address does not hold at another, also
            if another job of the same user has the same secret.
    """
    return Handshake(secret, _PURPOSE, str(task), f"the first task, at {first}")


def handshake_of_first(secret: Secret, first: str) -> Handshake:
    """The first task's proof on a connection that it has accepted; the other task says who it is."""
    return Handshake(secret, _PURPOSE, f"the first task, at {first}")


class Lines:
    """Encodes and decodes the lines of one connection.

    Args:
        handshake: the connection's handshake, which has succeeded; None if the job has no secret.
    """

    def __init__(self, handshake: Handshake | None) -> None:
        self._signer = None if handshake is None else Signer(handshake)
        self._key = None if handshake is None else handshake.key

    @property
    def proved(self) -> bool:
        """Whether the other side has proved that it knows the job's secret."""
        return self._signer is not None

    def key(self) -> bytes:
        """A key for what both sides send after the rendezvous; b"" if the job has no secret."""
        return b"" if self._key is None else self._key.sign("link")

    def encode(self, kind: str, /, **content: Any) -> bytes:
        """One message as a line, signed if the job has a secret."""
        message: dict[str, Any] = {"dtrain": kind, "protocol": PROTOCOL, **content}
        if self._signer is not None:
            message[_SIGNATURE] = self._signer.sign(_canonical(message)).hex()
        return json.dumps(message).encode() + b"\n"

    def decode(self, line: bytes) -> dict[str, Any] | None:
        """The message in a line, or None if it is not the other side's next message."""
        try:
            message = json.loads(line)
            if not (isinstance(message, dict) and isinstance(message.get("dtrain"), str)):
                return None
            signature = bytes.fromhex(str(message.pop(_SIGNATURE, "")))
            if self._signer is not None and not self._signer.has_signed(signature, _canonical(message)):
                return None
        except (ValueError, RecursionError):
            return None
        return message


def _canonical(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, sort_keys=True).encode()
