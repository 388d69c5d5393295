"""The messages between the workers of a job with a quorum and the server of its rounds.

A message is a JSON object that fits its schema exactly, and bytes whose meaning and size follow from it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dtrain.base.json_messages import Malformed, from_json, load, to_json
from dtrain.environments.topology import MOST_TASKS
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import SignedFrames

PURPOSE = "quorum"
"""What the connections are for, in the proof at their beginning."""

SERVER = "the server of the rounds"
"""The name of the server there."""

_KIND = 1
_HEAD = struct.Struct("!I")
_LONGEST_HEAD = 1 << 24  # bytes of a message's JSON
_MOST_VALUES = 1 << 32
_LARGEST = 1 << 35  # bytes of a message
_AT_ONCE = 1 << 20

_Count = Annotated[int, range(1 << 62)]


@dataclass(frozen=True)
class Agreed:
    """What is the same on all workers, compared before they train together.

    Attributes:
        every: the steps of a round.
        kind: what is averaged: "changes" (DiLoCo) or "weights" (local SGD).
        changes: how many numbers a contribution has that may be sent in few bits.
        further: how many numbers it has besides.
        dtype: of a number that is sent whole.
        bits: of the others; 0 to send these whole, too.
        state: the bytes of a state.
    """

    every: Annotated[int, range(1, 1 << 40)]
    kind: Annotated[str, ("changes", "weights")]
    changes: Annotated[int, range(_MOST_VALUES)]
    further: Annotated[int, range(_MOST_VALUES)]
    dtype: Annotated[str, ("float32", "float64")]
    bits: Annotated[int, (0, 4, 8)]
    state: Annotated[int, range(_LARGEST)]


@dataclass(frozen=True)
class Join:
    """A worker wants to take part in this `fit`; answered by Begin, Take, Over or JoinRefused."""

    fit: _Count
    agreed: Agreed


@dataclass(frozen=True)
class Contribute:
    """What a worker has changed in a round; answered by Mean, Late, Over, or first by AskState.

    Attributes:
        rows: the examples of which it has made steps.
        joinable: whether others can join after the round.
    """

    fit: _Count
    round: _Count
    rows: _Count
    joinable: bool


@dataclass(frozen=True)
class Logs:
    """A worker's logs of an epoch, float64 in the order of the names; a round of its own, as Contribute."""

    fit: _Count
    round: _Count
    rows: _Count
    names: Sequence[str]


@dataclass(frozen=True)
class Give:
    """A worker's state; `about` is a text of `plain_values`. Answered by Taken."""

    fit: _Count
    round: _Count
    about: str


@dataclass(frozen=True)
class EndFit:
    """A worker has ended its `fit`; answered by Ended."""

    fit: _Count


@dataclass(frozen=True)
class Meet:
    """A `broadcast` or a `barrier` of the program, outside of `fit`; answered by Met or JoinRefused.

    Attributes:
        number: how many of them came before in this process; every start of the program makes the same.
        text: the first worker's value, encoded by `plain_values`.
        barrier: whether all workers are waited for, not the first one alone.
    """

    number: _Count
    text: str
    barrier: bool


@dataclass(frozen=True)
class Begin:
    """The worker begins from what it has, and gives this state to the others."""


@dataclass(frozen=True)
class Take:
    """The state with which a worker becomes a member, of the beginning of a round."""

    round: _Count
    about: str


@dataclass(frozen=True)
class Over:
    """The `fit` has ended; its last state, or no bytes if nobody has given one."""

    about: str


@dataclass(frozen=True)
class Mean:
    """The mean of a round.

    Attributes:
        members: how many workers have contributed.
        rows: the sum of their examples.
        give: whether this worker must give its state before its next step.
        first: whether this worker is the first one of them, whose callbacks may end the `fit`.
    """

    members: Annotated[int, range(1, MOST_TASKS + 1)]
    rows: _Count
    give: bool
    first: bool


@dataclass(frozen=True)
class Late:
    """The contribution came too late, or cannot be used, and was dropped; the worker joins again."""


@dataclass(frozen=True)
class AskState:
    """The worker gives the state of the beginning of its round, while it waits for the end of the round."""


@dataclass(frozen=True)
class Taken:
    """A state has come."""


@dataclass(frozen=True)
class Ended:
    """The end of a `fit` is known.

    Attributes:
        give: whether this worker must give its state, because it is the first one that has ended.
        report: what the rounds have taken part in so far, by `QuorumReport.as_record`, as JSON.
    """

    give: bool
    report: str


@dataclass(frozen=True)
class Met:
    """The text that the first worker sent when it came here first."""

    text: str


@dataclass(frozen=True)
class JoinRefused:
    """The worker cannot take part."""

    why: str


Request = Join | Contribute | Logs | Give | EndFit | Meet
Answer = Begin | Take | Over | Mean | Late | AskState | Taken | Ended | Met | JoinRefused


class BrokenLinkError(OSError):
    """The connection cannot be used any more."""


class MessageSocket:
    """One end of a connection: sends and receives messages, and blocks until that is done.

    Args:
        sock: the connected socket, after the proof.
        key: the connection's key.
        connected: whether this end has connected.
        receives: the union of the messages that this end accepts.
    """

    def __init__(self, sock: socket.socket, key: Secret, receives: Any, *, connected: bool) -> None:
        self._sock = sock
        self._sock.settimeout(None)
        self._frames = SignedFrames(key, connected=connected)
        self._receives = receives
        self._inbox: deque[bytes] = deque()
        self.limit = _LARGEST

    def send(self, message: Any, content: bytes = b"") -> None:
        """Sends a message.

        Raises:
            OSError: the connection is lost.
        """
        head = json.dumps(to_json(message)).encode()
        for part in self._frames.encode(_KIND, 0, b"".join((_HEAD.pack(len(head)), head, content))):
            self._sock.sendall(part)

    def receive(self) -> tuple[Any, bytes]:
        """The next message and its bytes.

        Raises:
            OSError: the connection is lost, or what came is no message of the other end.
        """
        while not self._inbox:
            more = self._sock.recv(_AT_ONCE)
            if not more:
                raise ConnectionAbortedError("it was closed")
            self._inbox.extend(body for _, _, body in self._frames.decode(more, self.limit))
        body = self._inbox.popleft()
        try:
            (size,) = _HEAD.unpack_from(body)
            if size > _LONGEST_HEAD:
                raise Malformed("too long")
            message = from_json(load(body[_HEAD.size : _HEAD.size + size]), self._receives)
        except (struct.error, ValueError) as error:
            raise BrokenLinkError(f"a message cannot be read: {error}") from None
        return message, body[_HEAD.size + size :]

    def close(self) -> None:
        """Closes the connection, also where another thread waits for a message."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
