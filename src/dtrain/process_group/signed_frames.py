"""The frames in which processes send each other small messages: their format and their signature.

The rendezvous, the links between workers and `dtrain doctor` use them. If the job has a secret, each frame is
signed with a key of its connection, over its direction, its place and its content, so that no frame can be
forged, changed, replayed, returned or left out on the way. Nothing is encrypted. This module computes what to
send and judges what has come; the callers send and receive.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from dtrain.process_group.secret import SIZE, Secret

PROTOCOL = 4
"""The version of the frames and of the messages of the rendezvous."""

_HEADER = struct.Struct("!BQQ")  # the kind, a number, and the size of the body
_MESSAGE = 255  # the kind of frames that hold JSON; no link between workers has it
_MESSAGE_LIMIT = 1 << 20  # bytes; a cluster of ten thousand tasks is smaller


class ForgedFrameError(OSError):
    """A frame cannot come from the process at the other end; the connection cannot be used any more."""


class SignedFrames:
    """Encodes this end's frames on one connection, and decodes those of the other end.

    Args:
        key: a key of this connection that only both ends know; None if the job has no secret, so that frames
            have no signature.
        connected: whether this end has connected, or has accepted the connection.
    """

    def __init__(self, key: Secret | None, *, connected: bool) -> None:
        self._key = key
        self._sides = ("connected", "accepted") if connected else ("accepted", "connected")
        self._sent = self._received = 0
        self._inbox = bytearray()

    def encode(self, kind: int, number: int, body: bytes) -> list[bytes]:
        """This end's next frame, in parts: a large body is not copied.

        Args:
            kind: 0 to 255.
            number: 0 to 2**64 - 1; the caller's own, such as the number of a round.
            body: what is sent.
        """
        header = _HEADER.pack(kind, number, len(body))
        parts = [header, body]
        if self._key is not None:
            parts.append(self._key.sign(self._sides[0], self._sent, header, body))
        self._sent += 1
        return parts

    def decode(self, data: bytes, limit: int) -> Iterator[tuple[int, int, bytes]]:
        """Takes received bytes; yields the kind, number and body of each frame that is complete.

        Raises:
            ForgedFrameError: the other end has not signed this as its next frame, or the body of a frame has
                more than `limit` bytes.
        """
        self._inbox += data
        while len(self._inbox) >= _HEADER.size:
            header = bytes(self._inbox[: _HEADER.size])
            kind, number, size = _HEADER.unpack(header)
            if size > limit:
                raise ForgedFrameError("a message in its name cannot be read: its size is impossible")
            end = _HEADER.size + size
            whole = end if self._key is None else end + SIZE
            if len(self._inbox) < whole:
                return
            with memoryview(self._inbox) as inbox:
                body, signature = bytes(inbox[_HEADER.size : end]), bytes(inbox[end:whole])
            del self._inbox[:whole]
            signed = (self._sides[1], self._received, header, body)
            if self._key is not None and not self._key.has_signed(signature, *signed):
                raise ForgedFrameError("a message in its name is not signed by it")
            self._received += 1
            yield kind, number, body

    def encode_message(self, kind: str, /, **content: Any) -> bytes:
        """This end's next frame, with a message that JSON can hold."""
        return b"".join(self.encode(_MESSAGE, 0, json.dumps({"dtrain": kind, **content}).encode()))

    def decode_messages(self, data: bytes) -> Iterator[dict[str, Any]]:
        """As `decode`, for messages; each has its kind, a text, as "dtrain".

        Raises:
            ForgedFrameError: as `decode`, or a frame holds no such message.
        """
        for _, _, body in self.decode(data, _MESSAGE_LIMIT):
            try:
                message = json.loads(body)
            except (ValueError, RecursionError):
                message = None
            if not (isinstance(message, dict) and isinstance(message.get("dtrain"), str)):
                raise ForgedFrameError("a message in its name cannot be read")
            yield message
