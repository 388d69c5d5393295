"""The first training task's side of the meeting before training: who is here, and do all mean the same job?

It serves one meeting on a listening socket and closes it; it never sees TensorFlow, and what strangers send
to the port changes nothing.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dtrain.errors import DtrainError, PeerMismatchError, PeerMissingError, PortInUseError
from dtrain.topology import Task, Topology

PROTOCOL = 1
LOG_INTERVAL = 10.0  # seconds between two words on who is missing
HELLO_PATIENCE = 5.0  # seconds that either side gives the other for its first message
MESSAGE_LIMIT = 1 << 20  # bytes; a cluster of ten thousand tasks is smaller
_LINGER = 5.0  # seconds that the first task stays to tell late comers why there will be no job

ERRORS: Mapping[str, Callable[..., DtrainError]] = {
    "missing": PeerMissingError,
    "mismatch": PeerMismatchError,
    "port in use": PortInUseError,
}
"""What a verdict other than "go" is raised as, on every task."""


@dataclass
class Guest:
    """A connection to the listening task: a stranger until it has said a proper hello."""

    sock: socket.socket
    since: float
    inbox: bytes = b""
    task: Task | None = None
    process: str = ""


class Verdict(Exception):  # noqa: N818 - an outcome that ends the meeting, not an error of the program
    """Why there will be no job, for every task; `kind` is a key of ERRORS."""

    def __init__(self, kind: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.hint = hint

    def error(self) -> DtrainError:
        """What to raise on a task that hears of it."""
        return ERRORS[self.kind](self.message, hint=self.hint)


def encode(kind: str, /, **content: Any) -> bytes:
    """One message of the meeting: a line of JSON."""
    return json.dumps({"dtrain": kind, "protocol": PROTOCOL, **content}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message in a line, or None where it is not one of ours."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("dtrain"), str) else None


def missing_error(missing: list[str], seconds: float) -> Verdict:
    """What to say of tasks that did not come within the time limit."""
    return Verdict(
        "missing",
        f"Not every process of the job is there after {seconds:.3g} s. Missing: {', '.join(missing)}.",
        "Start all processes of the job, see why those ended or cannot be reached, or set "
        "DTRAIN_PEER_TIMEOUT to a longer time in seconds.",
    )


class RollCall:
    """Serves one meeting.

    Args:
        topology: the job as this task knows it.
        listener: a listening socket at this task's address; closed when the meeting ends.
        process: this process, for messages.
        timeout: seconds to wait for all.
        log: gets a line now and then on who is missing.
    """

    def __init__(
        self,
        topology: Topology,
        listener: socket.socket,
        *,
        process: str,
        timeout: float,
        log: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._listener = listener
        self._process = process
        self._timeout = timeout
        self._log = log
        self._start = 0.0
        self._guests: dict[socket.socket, Guest] = {}
        self._expected = [t for t in topology.training_tasks() if t != topology.task]
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Return when every training task has come.

        Raises:
            PeerMissingError, PeerMismatchError, PortInUseError: as every task that came is told as well.
        """
        self._start = start = time.monotonic()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            self._wait_for_all(start)
            # Before anybody hears "go": TensorFlow needs the port, and nobody may come to a past meeting.
            self._close_listener()
            self._tell_all(encode("go"))
        except Verdict as verdict:
            self._dismiss(verdict)
        finally:
            self._close_listener()
            self._selector.close()
            for guest in self._guests.values():
                guest.sock.close()

    def _wait_for_all(self, start: float) -> None:
        next_log = start + LOG_INTERVAL
        while missing := self._missing():
            now = time.monotonic()
            if now >= start + self._timeout:
                raise missing_error(self._described(missing), self._timeout)
            if now >= next_log:
                next_log += LOG_INTERVAL
                names = self._described(missing)
                self._log(f"waiting for {', '.join(names)}; giving up in {start + self._timeout - now:.0f} s")
                self._tell_all(encode("waiting", missing=names))
            self._serve(min(next_log, start + self._timeout) - now)

    def _serve(self, seconds: float) -> None:
        for key, _ in self._selector.select(timeout=max(0.0, min(seconds, 1.0))):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(self._guests[key.data])
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if guest.task is None and now - guest.since > HELLO_PATIENCE:
                self._drop(guest)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone before we looked
            return
        sock.setblocking(False)
        self._guests[sock] = Guest(sock, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, data=sock)

    def _read(self, guest: Guest) -> None:
        try:
            chunk = guest.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        guest.inbox += chunk
        *lines, guest.inbox = guest.inbox.split(b"\n")
        for line in lines:
            message = decode(line)
            if message is None:
                return self._drop(guest)
            self._hear(guest, message)
        if not chunk or len(guest.inbox) > MESSAGE_LIMIT:
            self._drop(guest)
        return None

    def _hear(self, guest: Guest, message: dict[str, Any]) -> None:
        if message["dtrain"] == "gave up" and guest.task is not None:
            raise missing_error(self._described(self._missing()), time.monotonic() - self._start)
        if message["dtrain"] != "hello" or guest.task is not None:
            return
        job, index, process = message.get("job"), message.get("index"), message.get("process")
        if not (isinstance(job, str) and type(index) is int and isinstance(process, str)):
            return
        guest.process = process
        guest.task = Task(job, index)
        if message.get("protocol") != PROTOCOL:
            raise _mismatch(f"{self._name(guest)} runs another version of dtrain than {self._own_name()}.")
        if problem := message.get("problem"):
            raise Verdict("port in use", str(problem), "Free the port, or give that task another one.")
        self._compare(guest, message.get("cluster"))
        self._tell(guest, encode("waiting", missing=self._described(self._missing())))

    def _compare(self, guest: Guest, cluster: Any) -> None:
        names = self._own_name(), self._name(guest)
        if difference := describe_difference(self._topology.jobs, cluster, *names):
            if guest.task == self._topology.task:
                # The first task of another job, which was given our port: its mistake, not this job's end.
                self._turn_away(guest)
                return
            raise _mismatch(difference)
        if guest.task == self._topology.task:
            raise _two_claim(guest, self._process)
        if guest.task not in self._expected:
            raise _mismatch(f"{self._name(guest)} is not a training task of this cluster.")
        for other in list(self._guests.values()):
            if other is not guest and other.task == guest.task:
                if not _is_alive(other.sock):  # it died and was started again
                    self._drop(other)
                    continue
                raise _two_claim(guest, other.process)

    def _turn_away(self, guest: Guest) -> None:
        message = f"{self._topology.address} is in use by {self._own_name()} of another job."
        self._tell(guest, encode("error", kind="port in use", message=message, hint=""))
        self._drop(guest)

    def _dismiss(self, verdict: Verdict) -> NoReturn:
        """Tell everybody, also those who come within the next seconds, and raise."""
        text = encode("error", kind=verdict.kind, message=verdict.message, hint=verdict.hint)
        deadline = time.monotonic() + (0.0 if verdict.kind == "missing" else min(_LINGER, self._timeout))
        told: set[Task] = set()
        while True:
            for guest in [g for g in self._guests.values() if g.task is not None]:
                told.add(guest.task or self._topology.task)
                self._tell(guest, text)
                self._drop(guest)
            left = deadline - time.monotonic()
            if left <= 0 or told.issuperset(self._expected):
                break
            try:
                self._serve(left)
            except Verdict:
                continue  # one reason is enough; whoever brought another hears the first
        raise verdict.error() from None

    def _missing(self) -> list[Task]:
        here = {guest.task for guest in self._guests.values()}
        return [task for task in self._expected if task not in here]

    def _described(self, tasks: list[Task]) -> list[str]:
        return [f"{task} ({self._topology.address_of(task)})" for task in tasks]

    def _own_name(self) -> str:
        return f"{self._topology.task} ({self._process})"

    def _name(self, guest: Guest) -> str:
        return f"{guest.task} ({guest.process})"

    def _tell_all(self, message: bytes) -> None:
        for guest in list(self._guests.values()):
            if guest.task is not None:
                self._tell(guest, message)

    def _tell(self, guest: Guest, message: bytes) -> None:
        try:
            guest.sock.settimeout(1.0)
            guest.sock.sendall(message)
            guest.sock.setblocking(False)
        except OSError:  # it is gone; its own time limit, or the launcher, tells of it
            pass

    def _drop(self, guest: Guest) -> None:
        if self._guests.pop(guest.sock, None) is not None:
            self._selector.unregister(guest.sock)
            guest.sock.close()

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()


def describe_difference(
    mine: Mapping[str, tuple[str, ...]], other: Any, my_name: str, other_name: str
) -> str | None:
    """What differs between two clusters, in a sentence; None where they are the same."""
    if not isinstance(other, dict) or not all(isinstance(v, list) for v in other.values()):
        return f"{other_name} did not say what its cluster is."
    for job in sorted({*mine, *other}):
        ours, theirs = list(mine.get(job, ())), other.get(job, [])
        if len(ours) != len(theirs):
            return f'{my_name} has {len(ours)} task(s) of job "{job}", but {other_name} has {len(theirs)}.'
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                return f"{my_name} has {job} {index} at {our!r}, but {other_name} has it at {their!r}."
    return None


def _mismatch(message: str) -> Verdict:
    return Verdict(
        "mismatch", message, 'Give all processes the same "cluster" in TF_CONFIG, and each its own "task".'
    )


def _two_claim(guest: Guest, other: str) -> Verdict:
    return _mismatch(f"Two processes say that they are {guest.task}: {other} and {guest.process}.")


def _is_alive(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
