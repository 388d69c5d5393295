"""The rendezvous of all training tasks before TensorFlow starts: all there, one cluster, all ports free.

TensorFlow itself waits in silence for a peer that never comes, and for many minutes for a port that is taken;
here each is a typed error on every task. Where the job has a secret, who does not know it changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from dtrain.cluster import settings
from dtrain.cluster.rendezvous_lines import CHALLENGE, ERRORS, MESSAGE_LIMIT, Lines, missing_error
from dtrain.cluster.rendezvous_server import HELLO_PATIENCE, LOG_INTERVAL, RendezvousServer, giving_up
from dtrain.cluster.secret import job_secret
from dtrain.cluster.sockets import EXHAUSTED, bind_everywhere, connect_to, listen_at, this_process_listens_on
from dtrain.errors import (
    ClusterConfigError,
    ConfigurationError,
    PeerMismatchError,
    PeerMissingError,
    PortInUseError,
)
from dtrain.plain_text import cleaned
from dtrain.topology import Topology, split_address

_PORT_PATIENCE = 2.0  # seconds that a port may still be held by a process that is just ending
_FIRST_PAUSE = 0.01  # seconds between two tries to reach the first task: tasks often start together,
_LONGEST_PAUSE = 0.2  # and where they do not, we look less often
_REPORT_PATIENCE = 3.0  # seconds spent on telling the others of a port in use
_ANSWER_SHOWN = 2000  # characters of the first task's answer that an error shows
_VERDICT_PATIENCE = 2.0  # seconds for the first task to answer once our own time is over

# Ports of this process whose rendezvous is over: TensorFlow may serve there now, and does not stop.
_met: set[int] = set()


def check_peers(
    topology: Topology,
    *,
    timeout: float | None = None,
    log: Callable[[str], None] | None = None,
    secret: bytes | None = None,
) -> None:
    """Meet the other training tasks; return when all are there and agree, with this task's port free again.

    Every training task must call it, before TensorFlow's servers start. For other tasks, and where TensorFlow
    already serves in this process after an earlier call, there is nothing to do.

    Args:
        topology: the job, as this process knows it.
        timeout: seconds to wait for all; by default `settings.peer_timeout()`.
        log: gets a line every 10 seconds on who is missing; by default standard error does.
        secret: what every task of the job knows and nobody else; None takes the job's, and b"" is none.
            Without one, a process that does not fit is refused and logged, and does not end the rendezvous of
            the others.

    Raises:
        PortInUseError: another process serves on the address of this task, or of a peer.
        PeerMissingError: not all came in time; the message names who is missing.
        PeerMismatchError: the clusters differ, or two processes say that they are the same task.
        ConfigurationError: this process may not open as many connections as it takes.
        ClusterConfigError: the port of this task is one that this user may not serve on.
    """
    if not topology.is_training_task:
        return
    if timeout is None:
        timeout = settings.peer_timeout()
    if secret is None:
        shared = job_secret(topology)
        secret = b"" if shared is None else shared.sign("meeting")
    try:
        _meet(topology, timeout, log or log_to_stderr, secret)
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        raise ConfigurationError(
            f"{topology.task} cannot open a connection to the other tasks: {error.strerror}.",
            hint="Raise the limit of open files (ulimit -n).",
        ) from error


def _meet(topology: Topology, timeout: float, log: Callable[[str], None], secret: bytes | None) -> None:
    host, port = split_address(topology.address)
    if port in _met and this_process_listens_on(port):
        return
    rendezvous = _Rendezvous(topology, timeout, log, secret)
    try:
        held = hold_port(topology.address, port)
    except PortInUseError as error:
        if topology.world_size > 1:
            rendezvous.report_port_in_use(error)
        raise
    with held:
        if topology.world_size > 1:
            rendezvous.serve(host, port) if topology.rank == 0 else rendezvous.attend()
    _met.add(port)


class _Rendezvous:
    def __init__(
        self, topology: Topology, timeout: float, log: Callable[[str], None], secret: bytes | None
    ) -> None:
        self._topology = topology
        self._timeout = timeout
        self._log = log
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._first = topology.training_tasks()[0]
        self._secret = secret or None
        self._first_address = topology.address_of(self._first)
        self._deadline = time.monotonic() + timeout
        self._next_log = time.monotonic() + LOG_INTERVAL
        self._foreign = False
        self._missing: list[str] = []  # as the first task last said

    def serve(self, host: str, port: int) -> None:
        """The first task's part."""
        try:
            listener = listen_at(host, port, backlog=max(128, self._topology.world_size))
        except OSError as error:
            raise _port_error(self._topology.address, error) from error
        RendezvousServer(
            self._topology,
            listener,
            process=self._process,
            timeout=self._timeout,
            log=self._log,
            secret=self._secret,
        ).run()

    def attend(self) -> None:
        """Every other task's part: say hello to the first task until it says go."""
        pause = _FIRST_PAUSE
        while True:
            if self._visit(self._deadline):
                return
            if time.monotonic() >= self._deadline:
                raise missing_error(self._missing or [self._describe_first()], self._timeout).error()
            self._log_now_and_then([self._describe_first()])
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    def report_port_in_use(self, error: PortInUseError) -> None:
        """Tell the first task that this one cannot serve, so that nobody waits for it.

        Raises:
            PeerMismatchError: it is the first task that holds our port, so we are one too many.
        """
        problem = "" if self._topology.task == self._first else f"{self._topology.task}: {error.message}"
        deadline = time.monotonic() + min(_REPORT_PATIENCE, self._timeout)
        with contextlib.suppress(PortInUseError, PeerMissingError):
            while time.monotonic() < deadline and not self._visit(deadline, problem):
                if not problem:  # whoever holds the port has had its chance to be one of us
                    return
                time.sleep(0.2)

    def _visit(self, deadline: float, problem: str = "") -> bool:
        """One connection to the first task, to its end: True for go, False where another try is due."""
        host, port = split_address(self._first_address)
        left = deadline - time.monotonic()
        sock = connect_to(host, port, timeout=max(0.1, min(2.0, left)))
        if sock is None:
            return False
        verdict: dict[str, Any] | None = None
        with sock, contextlib.suppress(OSError):
            verdict = self._talk(sock, deadline, problem)
        if verdict is None:
            if time.monotonic() < deadline:
                self._missing = []  # what the first task said before we lost it is stale
            return False
        if verdict["dtrain"] == "go":
            return True
        # Only here, outside the `suppress`: some of these errors are OSErrors.
        kind, message, hint = (verdict.get(key) for key in ("kind", "message", "hint"))
        make = ERRORS.get(kind, PeerMismatchError) if isinstance(kind, str) else PeerMismatchError
        raise make(_text(message, "The first task refused this one."), hint=_text(hint, ""))

    def _talk(self, sock: socket.socket, deadline: float, problem: str) -> dict[str, Any] | None:
        """Say hello and wait for the first task's verdict; None where it gives none in our time."""
        lines = Lines(self._secret, first=False)
        hello: dict[str, Any] = {
            "job": self._topology.task_type,
            "index": self._topology.task_index,
            "process": self._process,
            "cluster": self._topology.jobs,
            "problem": problem,
        }
        inbox = b""
        silent_until = min(deadline, time.monotonic() + HELLO_PATIENCE)
        gave_up = answered = False
        if not lines.signed:
            sock.sendall(lines.encode("hello", **hello))
        while (now := time.monotonic()) < deadline + _VERDICT_PATIENCE:
            if not answered and now >= silent_until:
                self._foreign = True  # it took our connection, but does not know how to answer
                return None
            if now >= deadline and not gave_up:
                gave_up = True
                sock.sendall(lines.encode("gave up"))
            sock.settimeout(min(0.5, max(0.05, deadline - now)))
            try:
                chunk = sock.recv(65536)
            except TimeoutError:
                self._log_now_and_then(self._missing)
                continue
            *found, inbox = (inbox + chunk).split(b"\n")
            for message in map(lines.decode, found):
                self._foreign = message is None
                if message is None:
                    return None
                if message["dtrain"] == CHALLENGE and lines.signed and not answered:
                    sock.sendall(lines.encode("hello", **hello))
                    continue
                if lines.signed and not lines.proven:
                    self._foreign = True
                    return None
                if message["dtrain"] in ("go", "error"):
                    return message
                answered = True
                self._missing = self._names_in(message)
            if not chunk or len(inbox) > MESSAGE_LIMIT:
                return None
        return None

    def _names_in(self, message: dict[str, Any]) -> list[str]:
        names = message.get("missing")
        if not isinstance(names, list):
            return []
        return [cleaned(name) for name in names[: self._topology.world_size] if isinstance(name, str)]

    def _describe_first(self) -> str:
        note = ", where something answers that is not dtrain waiting for its peers" if self._foreign else ""
        note += " with this job's secret" if note and self._secret is not None else ""
        return f"{self._first} ({self._first_address}{note})"

    def _log_now_and_then(self, missing: list[str]) -> None:
        now = time.monotonic()
        if now >= self._next_log and missing:
            self._next_log += LOG_INTERVAL
            self._log(f"waiting for {', '.join(missing)}{giving_up(self._deadline - now)}")


def hold_port(address: str, port: int) -> socket.socket:
    """Make sure that this task can serve on its port; the socket keeps others off it until it is closed.

    Raises:
        PortInUseError: another process serves there, also after two seconds.
        ClusterConfigError: this user may not serve there.
    """
    deadline = time.monotonic() + _PORT_PATIENCE
    while True:
        try:
            held = bind_everywhere(port)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise _port_error(address, error) from error
            time.sleep(0.1)
    if sys.platform != "linux":
        held.close()  # elsewhere a held port could not be listened on
    return held


def _port_error(address: str, error: OSError) -> PortInUseError | ClusterConfigError:
    if error.errno in EXHAUSTED:
        raise error
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"The address {address}, on which this task must serve, is in use by another process.",
            hint="End that process (a task of an earlier job, perhaps), or change the port in TF_CONFIG.",
        )
    return ClusterConfigError(
        f"This task cannot serve on {address}: {error.strerror}.",
        hint="Choose a port that this user may serve on, above 1023, in TF_CONFIG.",
    )


def _text(found: Any, instead: str) -> str:
    """What another process says in an error."""
    return cleaned(found, _ANSWER_SHOWN) if isinstance(found, str) else instead


def log_to_stderr(line: str) -> None:
    """What is said while a process waits, where the caller gave no place for it."""
    sys.stderr.write(f"dtrain: {line}\n")
    sys.stderr.flush()
