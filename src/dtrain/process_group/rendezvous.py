"""The rendezvous of all training tasks before TensorFlow starts: all present, one cluster, all ports free.

TensorFlow itself waits silently for a missing peer, and for many minutes for a port that is in use. Here,
both raise a typed error on every task. If the job has a secret, processes that do not know it are refused.
This module starts no TensorFlow server.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.plain_text import cleaned
from dtrain.base.tcp import EXHAUSTED, bind_everywhere, connect_to, listen_at, resolves, split_address
from dtrain.environments import settings
from dtrain.environments.topology import Task, Topology
from dtrain.errors import (
    ClusterConfigError,
    ConfigurationError,
    PeerMismatchError,
    PeerMissingError,
    PortInUseError,
)
from dtrain.process_group.logged_wait import LoggedWait
from dtrain.process_group.proof import introduce
from dtrain.process_group.rendezvous_server import HELLO_PATIENCE, RendezvousServer
from dtrain.process_group.rendezvous_verdict import ERRORS, Connection, handshake_with_first, missing_error
from dtrain.process_group.secret import Secret, job_secret
from dtrain.process_group.signed_frames import PROTOCOL, SignedFrames

_PORT_PATIENCE = 2.0  # seconds that a port may still be held by a process that is just ending
_FIRST_PAUSE = 0.01  # seconds between the first tries to connect, because tasks often start together
_LONGEST_PAUSE = 0.2  # the pause grows up to this many seconds
_REPORT_PATIENCE = 3.0  # seconds to report a port in use to the first task
_ANSWER_SHOWN = 2000  # characters of the first task's answer that an error shows
_SEE_LOG = "See the log of that task; all processes of a job need the same cluster in TF_CONFIG."
_OF_SECRET = "with this job's secret, at this address in its cluster"
_VERDICT_PATIENCE = 2.0  # seconds for the first task's verdict after this task's own time limit


def run_rendezvous(
    topology: Topology,
    *,
    timeout: float | None = None,
    log: Callable[[str], None] | None = None,
    secret: bytes | None = None,
    clock: Clock = REAL,
) -> dict[int, Connection]:
    """Wait until all training tasks are present and agree on the cluster; then this task's port is free.

    Every training task must call this, before TensorFlow's servers start, if they do. It returns at once for
    other tasks.

    Args:
        topology: the job, as this process knows it.
        timeout: seconds to wait for all tasks; by default `settings.peer_timeout()`.
        log: gets a line every 10 seconds that names the missing tasks; by default it goes to standard error.
        secret: bytes that only the job's tasks know; None takes the job's secret, and b"" means no secret.
            Without a secret, a process that does not fit the job is refused and logged, and the rendezvous of
            the others continues.
        clock: the clock of all time limits.

    Returns:
        The connections of the rendezvous, by the rank of the other end: on the first task those to all other
        training tasks, elsewhere that to the first; {} for a task that does not train, or trains alone.

    Raises:
        PortInUseError: another process serves on the address of this task, or of a peer.
        PeerMissingError: not all tasks joined in time; the message names the missing ones.
        PeerMismatchError: the tasks' clusters differ, or two processes claim to be the same task.
        ConfigurationError: the system refuses this process a connection, for instance by `ulimit -n`; or the
            file of the job's secret is invalid.
        ClusterConfigError: this user may not serve on this task's port.
    """
    if not topology.is_training_task:
        return {}
    if timeout is None:
        timeout = settings.peer_timeout()
    log = log or log_to_stderr
    shared = job_secret(topology) if secret is None else Secret(secret, "the caller") if secret else None
    try:
        return _run(topology, LoggedWait(timeout, log, clock), log, shared)
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        raise ConfigurationError(
            f"{topology.task} cannot open a connection to the other tasks: {error.strerror}.",
            hint="Raise the limit of open files (ulimit -n).",
        ) from error


def _run(
    topology: Topology, wait: LoggedWait, log: Callable[[str], None], secret: Secret | None
) -> dict[int, Connection]:
    host, port = split_address(topology.address)
    rendezvous = _Rendezvous(topology, wait, log, secret)
    try:
        held = hold_port(topology.address, port, wait.clock)
    except PortInUseError as error:
        if topology.world_size > 1:
            rendezvous.report_port_in_use(error)
        raise
    with held:
        if topology.world_size == 1:
            return {}
        if topology.rank > 0:
            return {0: rendezvous.join()}
        ranks = {task: rank for rank, task in enumerate(topology.training_tasks())}
        return {ranks[task]: connection for task, connection in rendezvous.serve(host, port).items()}


class _Rendezvous:
    def __init__(
        self, topology: Topology, wait: LoggedWait, log: Callable[[str], None], secret: Secret | None
    ) -> None:
        self._topology = topology
        self._wait = wait
        self._clock = wait.clock
        self._log = log
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._first = topology.training_tasks()[0]
        self._secret = secret
        self._first_address = topology.address_of(self._first)
        self._foreign = False
        self._missing: list[str] = []  # the missing tasks that the first task last reported

    def serve(self, host: str, port: int) -> dict[Task, Connection]:
        """Run the rendezvous, as the first task; returns the connections to the others."""
        try:
            listener = listen_at(host, port, backlog=max(128, self._topology.world_size))
        except OSError as error:
            raise _port_error(self._topology.address, error) from error
        return RendezvousServer(
            self._topology,
            listener,
            process=self._process,
            wait=self._wait,
            log=self._log,
            secret=self._secret,
        ).run()

    def join(self) -> Connection:
        """Join the rendezvous, as any other task: connect to the first task until it answers "go".

        Returns:
            The connection to the first task.
        """
        pause = _FIRST_PAUSE
        while True:
            if connection := self._connect_once(self._wait.deadline):
                return connection
            if self._wait.deadline.passed():
                raise missing_error(self._missing or [self._describe_first()], self._wait.seconds).error()
            self._wait.log_if_due([self._describe_first()])
            self._clock.sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)

    def report_port_in_use(self, error: PortInUseError) -> None:
        """Tell the first task that this one cannot serve on its port, so that the others do not wait for it.

        Raises:
            PeerMismatchError: the first task of this job holds the port, so this process is a duplicate.
        """
        problem = "" if self._topology.task == self._first else f"{self._topology.task}: {error.message}"
        deadline = self._clock.deadline(min(_REPORT_PATIENCE, self._wait.seconds))
        with contextlib.suppress(PortInUseError, PeerMissingError):
            while not deadline.passed() and not self._connect_once(deadline, problem):
                if not problem:  # the process that holds the port is no task of this job
                    return
                self._clock.sleep(0.2)

    def _connect_once(self, deadline: Deadline, problem: str = "") -> Connection | None:
        """Connect once to the first task, until its verdict.

        Returns:
            The connection after "go", None if another try is due. Any other verdict is raised as an error.
        """
        host, port = split_address(self._first_address)
        sock = connect_to(host, port, timeout=max(0.1, min(2.0, deadline.left())))
        if sock is None:
            return None
        verdict: dict[str, Any] | None = None
        frames: SignedFrames | None = None
        with contextlib.suppress(OSError):
            frames = self._introduce(sock, deadline)
            verdict = self._exchange(sock, frames, deadline, problem)
        if frames is not None and verdict is not None and verdict["dtrain"] == "go":
            return Connection(sock, frames)
        sock.close()
        if verdict is None:
            if not deadline.passed():
                self._missing = []  # the connection was lost, so the first task's last report is stale
            return None
        # Raised here, outside the `suppress(OSError)`, because some of these errors are OSErrors.
        kind, message, hint = (verdict.get(key) for key in ("kind", "message", "hint"))
        make = ERRORS.get(kind, PeerMismatchError) if isinstance(kind, str) else PeerMismatchError
        raise make(_text(message, self._refusal()), hint=_text(hint, _SEE_LOG))

    def _introduce(self, sock: socket.socket, deadline: Deadline) -> SignedFrames:
        """Have both sides prove that they know the job's secret, if it has one.

        Raises:
            OSError: the other side did not, or the connection is lost.
        """
        if self._secret is None:
            return SignedFrames(None, connected=True)
        handshake = handshake_with_first(self._secret, self._topology.task, self._first_address)
        until = self._clock.deadline(min(HELLO_PATIENCE, deadline.left()))
        self._foreign = True  # what answers there, until it has proved otherwise
        introduce(sock, handshake, until, self._log_wait)
        self._foreign = False
        return SignedFrames(handshake.key, connected=True)

    def _log_wait(self) -> None:
        self._wait.log_if_due(self._missing or [self._describe_first()])

    def _exchange(
        self, sock: socket.socket, frames: SignedFrames, deadline: Deadline, problem: str
    ) -> dict[str, Any] | None:
        """Send a hello and wait for the first task's verdict; None without one before the deadline."""
        hello: dict[str, Any] = {
            "protocol": PROTOCOL,
            "job": self._topology.task_type,
            "index": self._topology.task_index,
            "process": self._process,
            "cluster": self._topology.jobs,
            "problem": problem,
        }
        answers_until = self._clock.deadline(min(HELLO_PATIENCE, deadline.left()))
        verdict_until = Deadline(self._clock, deadline.at + _VERDICT_PATIENCE)
        gave_up = answered = False
        sock.sendall(frames.encode_message("hello", **hello))
        while not verdict_until.passed():
            if not answered and answers_until.passed():
                self._foreign = True  # the other side accepted the connection but does not speak the protocol
                return None
            if deadline.passed() and not gave_up:
                gave_up = True
                sock.sendall(frames.encode_message("gave up"))
            sock.settimeout(min(0.5, max(0.05, deadline.left())))
            try:
                chunk = sock.recv(65536)
            except TimeoutError:
                self._wait.log_if_due(self._missing)
                continue
            if not chunk:
                return None
            self._foreign = True  # until it is found to be a message
            for message in frames.decode_messages(chunk):
                self._foreign = False
                if message["dtrain"] == "go" and gave_up:
                    return None  # it crossed "gave up", which the first task now reads as a broken connection
                if message["dtrain"] in ("go", "error"):
                    return message
                answered = True
                self._missing = self._names_in(message)
        return None

    def _names_in(self, message: dict[str, Any]) -> list[str]:
        names = message.get("missing")
        if not isinstance(names, list):
            return []
        return [cleaned(name) for name in names[: self._topology.world_size] if isinstance(name, str)]

    def _refusal(self) -> str:
        return f"{self._first} ({self._first_address}) refused this process, {self._topology.task}."

    def _describe_first(self) -> str:
        note = ""
        if self._foreign:
            of_secret = "without a secret (DTRAIN_SECRET_FILE)" if self._secret is None else _OF_SECRET
            note = f", where something answers that is not a dtrain process waiting for its peers {of_secret}"
        if not resolves(split_address(self._first_address)[0]):
            note = ", a name that does not resolve here yet"  # such as a pod's that has not started
        return f"{self._first} ({self._first_address}{note})"


def hold_port(address: str, port: int, clock: Clock = REAL) -> socket.socket:
    """Check that this task can serve on its port, and reserve the port.

    Returns:
        A bound socket that keeps other processes off the port until it is closed.

    Raises:
        PortInUseError: another process still serves on the port after two seconds.
        ClusterConfigError: this user may not serve on the port.
    """
    deadline = clock.deadline(_PORT_PATIENCE)
    while True:
        try:
            return bind_everywhere(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or deadline.passed():
                raise _port_error(address, error) from error
            clock.sleep(0.1)


def _port_error(address: str, error: OSError) -> PortInUseError | ClusterConfigError:
    if error.errno in EXHAUSTED:
        raise error
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"The address {address}, on which this task must serve, is in use by another process.",
            hint="End that process (a task of an earlier job, perhaps), or change the port in TF_CONFIG; "
            "under Slurm or torchrun, set DTRAIN_PORT.",
        )
    return ClusterConfigError(
        f"This task cannot serve on {address}: {error.strerror}.",
        hint="Choose a port that this user may serve on, above 1023, in TF_CONFIG.",
    )


def _text(found: Any, instead: str) -> str:
    """A text from another process, cleaned for an error message; `instead` if it is no text."""
    return cleaned(found, _ANSWER_SHOWN) if isinstance(found, str) else instead


def log_to_stderr(line: str) -> None:
    """Write a log line of a waiting process to standard error; the default `log` of the functions here."""
    sys.stderr.write(f"dtrain: {line}\n")
    sys.stderr.flush()
