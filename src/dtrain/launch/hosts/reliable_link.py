"""Numbered messages over a connection that may lose some: unacknowledged messages are sent again, in order.

Every second each side sends a numbered beat, and returns the number of the other side's newest beat. So each
side knows when it last heard the other, and which of its own beats the other has heard. It opens no socket:
`control_plane` writes the frames.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Iterator

from dtrain.base.clock import REAL, Clock

BEAT = 1.0
"""Seconds between two beats."""

# The mark (it has the protocol's version); the numbers of this message, of the last message received, of this
# side's newest beat, and of the other side's newest beat.
_HEADER = struct.Struct(">4sQQQQ")
_MARK = b"dtl1"
_OFTEN = 64  # received messages after which an acknowledgement does not wait for the next beat
_AGAIN = 2.0  # seconds without an acknowledgement, after which messages are sent again
_AT_ONCE = 256  # the largest number of messages that are sent again together


class Link:
    """One side of a connection; one thread uses it.

    Args:
        write: sends a frame, if that is possible without waiting; a frame may be lost.
        clock: the clock of beats and limits.

    Attributes:
        heard_at: when the last frame of the other side came.
        lease_from: when this side sent the newest beat that the other side has confirmed.
    """

    def __init__(self, write: Callable[[bytes], None], clock: Clock = REAL) -> None:
        self._write = write
        self._clock = clock
        self._number = 0  # the number of the last message sent
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._seen = 0  # the number of the last message received
        self._acknowledged = 0
        self._beats: collections.deque[tuple[int, float]] = collections.deque(maxlen=64)
        self._beat = 0
        self._echo = 0
        self._sent_at = 0.0  # when the oldest of the waiting messages was last sent
        self._beat_at = float("-inf")
        self.heard_at = self.lease_from = clock.now()

    @property
    def unacknowledged(self) -> int:
        """The number of messages that the other side has not acknowledged yet."""
        return len(self._waiting)

    def renew(self) -> None:
        """Count the lease from now, because the other side has only just connected."""
        self.lease_from = self._clock.now()

    def send(self, body: bytes) -> None:
        """Send a message, which must not be empty."""
        self._number += 1
        if not self._waiting:
            self._sent_at = self._clock.now()
        self._waiting.append((self._number, body))
        self._frame(self._number, body)

    def receive(self, frame: bytes, room: bool = True) -> Iterator[bytes]:
        """Process a received frame; yields its message if it is the next one in order; ignores other bytes.

        Without `room` the message is not accepted, so that the other side sends it again later; the frame
        still counts as a sign of life.
        """
        if len(frame) < _HEADER.size:
            return
        mark, number, seen, beat, echo = _HEADER.unpack_from(frame)
        if mark != _MARK or seen > self._number or echo > self._beat:
            return
        self.heard_at = self._clock.now()
        self._echo = max(self._echo, beat)
        while self._beats and self._beats[0][0] <= echo:
            self.lease_from = self._beats.popleft()[1]
        while self._waiting and self._waiting[0][0] <= seen:
            self._waiting.popleft()
            self._sent_at = self.heard_at
        if room and number == self._seen + 1:
            self._seen = number
            yield frame[_HEADER.size :]
        if self._seen - self._acknowledged >= _OFTEN:
            self.acknowledge()

    def tick(self) -> None:
        """Send a beat if one is due, and unacknowledged messages again; call it several times a second."""
        now = self._clock.now()
        if now - self._beat_at < BEAT:
            return
        self._beat_at = now
        self._beat += 1
        self._beats.append((self._beat, now))
        self.acknowledge()
        # Not while the other side is silent: the messages that were sent before may still arrive.
        if self._waiting and now - self._sent_at >= _AGAIN and now - self.heard_at < _AGAIN:
            self._sent_at = now
            for number, body in list(self._waiting)[:_AT_ONCE]:
                self._frame(number, body)

    def acknowledge(self) -> None:
        """Tell the other side which messages have arrived here."""
        self._frame(0, b"")

    def _frame(self, number: int, body: bytes) -> None:
        self._acknowledged = self._seen
        self._write(_HEADER.pack(_MARK, number, self._seen, self._beat, self._echo) + body)
