"""The messages that tasks exchange in the rendezvous before training, and their authentication.

A message is one line of JSON. If the job has a secret, each side signs its lines with the secret and with a
random challenge from the other side, so that nobody else can forge a line or replay one from another
rendezvous. This module opens no connection.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.errors import DtrainError, PeerMismatchError, PeerMissingError, PortInUseError

PROTOCOL = 2
MESSAGE_LIMIT = 1 << 20  # bytes; a cluster of ten thousand tasks is smaller
CHALLENGE = "challenge"
_PROOF = "proof"

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


class Lines:
    """Encodes and decodes the lines of one connection.

    Args:
        secret: the job's secret, or None.
        first: whether this side is the first task, which runs the rendezvous.

    Attributes:
        challenge: the random hexadecimal text that the other side has to sign.
        proven: whether the last decoded line proves that the other side knows the secret.
    """

    def __init__(self, secret: bytes | None, *, first: bool) -> None:
        self._secret = secret
        self._first = first
        self.challenge = secrets.token_hex(16)
        self.proven = False
        self._to_sign = ""

    @property
    def signed(self) -> bool:
        """Whether the job has a secret, so that lines without a valid signature must be ignored."""
        return self._secret is not None

    def key(self) -> bytes:
        """A key for what both sides send after the rendezvous; b"" if the job has no secret."""
        if self._secret is None:
            return b""
        of_first, of_other = self.challenge, self._to_sign
        if not self._first:
            of_first, of_other = of_other, of_first
        return hmac.digest(self._secret, f"dtrain connection\0{of_first} {of_other}".encode(), "sha256")

    def encode(self, kind: str, /, **content: Any) -> bytes:
        """One message as a line, signed if the job has a secret."""
        message: dict[str, Any] = {"dtrain": kind, "protocol": PROTOCOL, **content}
        if self._secret is not None:
            message[CHALLENGE] = self.challenge
            message[_PROOF] = _proof(self._secret, self._first, self._to_sign, message)
        return json.dumps(message).encode() + b"\n"

    def decode(self, line: bytes) -> dict[str, Any] | None:
        """The message in a line, or None if the line is not a dtrain message; sets `proven`."""
        self.proven = False
        try:
            message = json.loads(line)
            if not (isinstance(message, dict) and isinstance(message.get("dtrain"), str)):
                return None
            proof = message.pop(_PROOF, None)
            if self._secret is not None and isinstance(proof, str):
                right = _proof(self._secret, not self._first, self.challenge, message)
                self.proven = hmac.compare_digest(proof.encode("utf-8", "replace"), right.encode())
        except (ValueError, RecursionError):
            return None
        self._to_sign = str(message.get(CHALLENGE, ""))[:64]
        return message


def _proof(secret: bytes, by_first: bool, challenge: str, message: Mapping[str, Any]) -> str:
    signed = json.dumps([by_first, challenge, message], sort_keys=True).encode()
    return hmac.new(secret, b"dtrain meeting\0" + signed, "sha256").hexdigest()
