"""One connection between two workers: sends and receives their `signed_frames`, as the socket allows.

The connection comes from the rendezvous, which has authenticated both ends. `peers` decides what the frames
mean.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrain.base.clock import REAL, Clock
from dtrain.base.plain_text import cleaned
from dtrain.base.tcp import notice_broken_link
from dtrain.errors import AuthenticationError, PeerMissingError
from dtrain.process_group.rendezvous_verdict import Connection

_SIZE = struct.Struct("!Q")
_AT_ONCE = 1 << 20  # bytes in one call of receive
_LARGE = 1 << 16  # bytes; a body of as many is not copied to be sent
_HOST = 100  # the most characters kept of the name of another worker's host
_LARGEST = 1 << 34  # bytes of a body; without a limit, a forged size would be waited for
_RUNNING = "RSDIW"  # states in /proc/PID/stat of processes that have neither ended nor been stopped

HINT = (
    "Another user or machine can change what the workers send to each other, or a process of another job has "
    "their secret; see docs/security.md."
)


class PeerLink:
    """One end of a connection to another worker; the caller holds a lock around each call.

    Args:
        worker: the number of the worker at the other end.
        connection: the socket and its frames; the link owns them from now on.
        first: whether this end is the first worker's.

    Attributes:
        worker: as given.
        sock: the socket, non-blocking.
        open: whether frames may be sent; the first worker waits for the other's first frame.
        process: the machine and the process id at the other end; None if they are not known.
    """

    def __init__(self, worker: int, connection: Connection, *, first: bool) -> None:
        self.worker = worker
        self.sock = connection.sock
        self.sock.setblocking(False)
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_broken_link(self.sock)
        self.open = not first
        self.process: tuple[str, int] | None = None
        self._frames = connection.frames
        self._outbox: deque[memoryview] = deque()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the socket can take them."""
        return bool(self._outbox)

    def send(self, kind: int, number: int = 0, body: bytes = b"") -> None:
        """Sends a frame, as far as the socket takes it at once; `flush` sends the rest.

        A large body is not copied, so that all links can send the same one.

        Raises:
            OSError: the connection is lost.
        """
        parts = self._frames.encode(kind, number, body)
        if len(body) < _LARGE:
            parts = [b"".join(parts)]
        self._outbox += [memoryview(part) for part in parts if part]
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it at once.

        Raises:
            OSError: the connection is lost.
        """
        while self._outbox:
            try:
                sent = self.sock.send(self._outbox[0])
            except BlockingIOError:
                return
            rest = self._outbox.popleft()[sent:]
            if rest:
                self._outbox.appendleft(rest)

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """Receives what has come; yields the kind, number and body of each complete frame.

        Raises:
            ForgedFrameError: a frame is not signed by the worker at the other end, or too large.
            OSError: the connection is lost, or was closed.
        """
        try:
            more = self.sock.recv(_AT_ONCE)
        except BlockingIOError:
            return
        if not more:
            raise OSError("it ended its program, or was killed")
        yield from self._frames.decode(more, _LARGEST)

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()


class LostPeers:
    """The workers that this one has lost; it is true if there is one."""

    def __init__(self, clock: Clock = REAL) -> None:
        self._clock = clock
        self._lost: dict[int, tuple[float, str, bool]] = {}  # when, why, and whether a frame was forged

    def __bool__(self) -> bool:
        return bool(self._lost)

    def note(self, worker: int, why: str, *, forged: bool = False) -> None:
        """Adds a worker; the first reason stays."""
        self._lost.setdefault(worker, (self._clock.now(), why, forged))

    def reasons(self) -> dict[int, str]:
        """Why each worker was lost."""
        return {worker: why for worker, (_, why, _) in self._lost.items()}

    def raise_if_any(self, grace: float) -> None:
        """Returns if no worker was lost more than `grace` seconds ago.

        Raises:
            PeerMissingError: a worker was lost.
            AuthenticationError: a frame in a worker's name was not signed by that worker.
        """
        now = self._clock.now()
        for worker, (_, why, forged) in self._lost.items():
            if forged:
                raise AuthenticationError(f"Worker {worker} was disconnected: {why}.", hint=HINT)
        lost = [
            f"worker {worker} ({why})"
            for worker, (since, why, _) in sorted(self._lost.items())
            if now - since >= grace
        ]
        if lost:
            raise PeerMissingError(
                f"While this worker waited for the others, it lost {' and '.join(lost)}.",
                hint="see why it ended; `dtrain launch` starts all workers again (--max-restarts N)",
            )


class Wakeup:
    """Wakes a thread that waits for sockets."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """Makes `reader` readable."""
        with contextlib.suppress(OSError):  # a full buffer wakes the thread too
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Reads what `wake` has written."""
        with contextlib.suppress(OSError):
            self.reader.recv(4096)


def joined(values: Sequence[bytes]) -> bytes:
    """Several values as one, for `split` at the other end."""
    return b"".join(part for value in values for part in (_SIZE.pack(len(value)), value))


def split(body: bytes, count: int) -> list[bytes]:
    """The values that `joined` was given.

    Raises:
        ValueError, struct.error: `joined` did not make the body of `count` values.
    """
    values, at = [], 0
    while at < len(body):
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size + size
        values.append(body[at - size : at])
    if len(values) != count or at != len(body):
        raise ValueError(f"{len(values)} values in {len(body)} bytes")
    return values


def this_process() -> bytes:
    """This machine, process and host name, for `parsed_process` at the other end."""
    return f"{_machine()} {os.getpid()}\n{socket.gethostname()}".encode()


def parsed_process(text: bytes) -> tuple[tuple[str, int] | None, str]:
    """The machine and the process id in a text of `this_process`, None if unknown, and the host name."""
    process, _, host = text.decode("utf-8", "replace").partition("\n")
    machine, _, pid = process.rpartition(" ")
    known = machine and pid.isascii() and pid.isdigit() and len(pid) < 12
    return (machine, int(pid)) if known else None, cleaned(host, _HOST)


def runs_here(process: tuple[str, int] | None) -> bool | None:
    """Whether a process of this machine exists and is not stopped; None if it is on another machine."""
    if process is None or process[0] != _machine() or not process[0]:
        return None
    try:
        state = Path(f"/proc/{process[1]}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in _RUNNING


def _machine() -> str:
    """A text that two processes share exactly if they can see each other's process ids; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
