"""The connection between agent and coordinator over the pipes of `ssh`.

`control_plane` has the one over sockets. In a pipe, each message is a line of JSON. A side that has
sent nothing for a second sends an empty line, so that the other side can detect a broken link by its silence.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import threading
from collections.abc import Callable

from dtrain.base.clock import REAL, Clock, RunClock
from dtrain.base.json_messages import Malformed
from dtrain.errors import PeerMismatchError
from dtrain.launch.hosts.agent_messages import LONGEST, HostMessage, encode, parse
from dtrain.launch.hosts.reliable_link import BEAT

_WAITING = 1024  # queued messages beyond which `send` blocks
_CLOSE_SECONDS = 3.0  # seconds to write the last messages
_CHECK = 1000  # milliseconds between two checks for silence


class PipeConnection:
    """A connection over two file descriptors, which it closes.

    Args:
        reading, writing: the descriptors.
        on_message: called in a thread with each message, or with the error of a message of another version.
            Lines that are no message are ignored, because remote shells may write lines of their own.
        on_end: called in that thread when the other side has closed its end, or was silent for too long.
        silence: seconds of silence, while this process runs, after which the connection ends; no limit before
            the first message.
        clock: the clock of that limit.
        lease: whether the limit is a lease, for which the time counts in which this process was stopped.
    """

    def __init__(
        self,
        reading: int,
        writing: int,
        on_message: Callable[[HostMessage | PeerMismatchError], None],
        on_end: Callable[[], None],
        silence: float,
        clock: Clock = REAL,
        *,
        lease: bool = False,
    ) -> None:
        self._on_message, self._on_end, self._silence = on_message, on_end, silence
        self._running = RunClock(clock, _CHECK / 1000)
        self._clock = clock if lease else self._running
        self._reading, self._writing = reading, writing
        self._outbox: queue.Queue[bytes] = queue.Queue(_WAITING)
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, name="dtrain-pipe-out", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="dtrain-pipe-in", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether either side has closed the connection."""
        return self._ended.is_set()

    def send(self, message: HostMessage) -> None:
        """Send a message; blocks while the queue of 1024 is full; drops the message if the pipe is closed."""
        line = encode(message) + b"\n"
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                self._outbox.put(line, timeout=0.2)
                return

    def close(self) -> None:
        """Write the queued messages, for a few seconds at most, and close the writing end."""
        with contextlib.suppress(queue.Full):
            self._outbox.put(b"", timeout=_CLOSE_SECONDS)
        self._writer.join(_CLOSE_SECONDS)
        self._ended.set()

    def _write(self) -> None:
        with contextlib.suppress(OSError), os.fdopen(self._writing, "wb", buffering=0) as pipe:
            while line := self._next():
                rest = memoryview(line)
                while rest:
                    rest = rest[pipe.write(rest) :]
        self._ended.set()

    def _next(self) -> bytes:
        try:
            return self._outbox.get(timeout=BEAT)
        except queue.Empty:
            # Whoever was given up hears nothing more, and ends.
            return b"" if self._ended.is_set() else b"\n"

    def _read(self) -> None:
        with contextlib.suppress(OSError), os.fdopen(self._reading, "rb", buffering=0) as pipe:
            poller, rest, limit = select.poll(), b"", math.inf
            poller.register(pipe, select.POLLIN)
            silent = self._clock.deadline(limit)
            # What has come is read first: a process that was stopped itself does not take that for silence.
            while (ready := poller.poll(_CHECK)) or not silent.passed():
                self._running.check()
                if not ready:
                    continue
                if not (block := pipe.read(1 << 16)):
                    break
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    if self._deliver(line):
                        limit = self._silence
                silent = self._clock.deadline(limit)
                if len(rest) > LONGEST:
                    rest = b""
        self._ended.set()
        self._on_end()

    def _deliver(self, line: bytes) -> bool:
        """Pass a line to `on_message`; returns whether it was a message."""
        try:
            self._on_message(parse(line))
        except Malformed:
            return False
        except PeerMismatchError as error:
            self._on_message(error)
        return True
