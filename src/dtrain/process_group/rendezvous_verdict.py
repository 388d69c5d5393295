"""What both sides of the rendezvous before training agree on: the proof of a connection, and how it can end.

This module opens no connection; `signed_frames` has the format of the messages.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain.environments.topology import Task
from dtrain.errors import DtrainError, PeerMismatchError, PeerMissingError, PortInUseError
from dtrain.process_group.proof import Handshake
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import SignedFrames

_PURPOSE = "rendezvous"

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
        frames: the frames on it, of which the first ones were those of the rendezvous.
    """

    sock: socket.socket
    frames: SignedFrames


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
