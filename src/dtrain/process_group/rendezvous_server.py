"""The first training task's side of the rendezvous: collects all tasks and checks that their clusters agree.

It serves one rendezvous on a listening socket and closes the socket. It does not use TensorFlow, and ignores
what other programs send to the port. It tells nothing about the job to a process that has not proved the
secret.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from dtrain.base.plain_text import cleaned
from dtrain.environments.topology import Task, Topology
from dtrain.process_group.acceptor import MOST_PENDING, Acceptor
from dtrain.process_group.logged_wait import LoggedWait
from dtrain.process_group.proof import Handshake
from dtrain.process_group.rendezvous_verdict import (
    Connection,
    Verdict,
    handshake_of_first,
    mismatch,
    missing_error,
)
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import PROTOCOL, SignedFrames

HELLO_PATIENCE = 5.0  # seconds that each side gives the other for its first message
_LINGER = 5.0  # seconds that the first task stays after a failure, to tell late tasks the reason
_AT_ONCE = 1 << 16  # bytes in one call of receive
_LOGGED = 10  # refusals that are logged, and repeated in the error if the rendezvous fails
_HIGHEST = 1_000_000  # an upper bound of task indices
_SHOWN = 400  # characters shown of a refused process's text
_NAME = 40  # characters shown of the name of a task


class Peer:
    """A connection to the first task; an `Acceptor` has it until its other end has said hello.

    Args:
        handshake: the proof that comes before the hello; None if the job has no secret.

    Attributes:
        handshake: as given.
        frames: set after the proof.
        messages: those that came last; the first one of all is the hello.
        sock, task, process: set after the hello.
    """

    frames: SignedFrames
    sock: socket.socket
    task: Task
    process: str

    def __init__(self, handshake: Handshake | None) -> None:
        self.handshake = handshake
        self.messages: list[dict[str, Any]] = []
        if handshake is None:
            self.frames = SignedFrames(None, connected=False)

    @property
    def wanted(self) -> int:
        """The most bytes to receive next."""
        return self.handshake.wanted if self.handshake and not self.handshake.proved else _AT_ONCE

    @property
    def proved(self) -> bool:
        """Whether the other end has proved that it knows the secret, if there is one, and said hello."""
        return bool(self.messages)

    def receive(self, data: bytes) -> bytes:
        """Takes received bytes; returns what to send.

        Raises:
            OSError: the connection must be closed, or was closed; a `ProofError` if the proof is wrong.
        """
        if self.handshake and not self.handshake.proved:
            answer = self.handshake.receive(data)
            if self.handshake.proved:
                self.frames = SignedFrames(self.handshake.key, connected=False)
            return answer
        if not data:
            raise OSError("it closed the connection")
        self.messages = [*self.frames.decode_messages(data)]
        return b""


class RendezvousServer:
    """Serves one rendezvous.

    A peer that does not prove that it knows the secret is refused and logged; so is, without a secret, a peer
    whose hello does not fit the job. Neither is told why. Only a peer that knows the secret can end the
    rendezvous for all by its hello.

    Args:
        topology: the job as this task knows it.
        listener: a listening socket at this task's address; it is closed when the rendezvous ends.
        process: the name of this process, for messages.
        wait: the wait for all tasks, which has begun, and its clock.
        log: gets a line about each process that was refused.
        secret: what only the job's tasks know, or None.
    """

    def __init__(
        self,
        topology: Topology,
        listener: socket.socket,
        *,
        process: str,
        wait: LoggedWait,
        log: Callable[[str], None],
        secret: Secret | None = None,
    ) -> None:
        self._topology = topology
        self._listener = listener
        self._process = process
        self._wait = wait
        self._clock = wait.clock
        self._log = log
        self._start = 0.0
        self._peers: list[Peer] = []  # those whose hello fits this job
        self._refused: list[str] = []
        self._expected = [t for t in topology.training_tasks() if t != topology.task]
        self._acceptor = Acceptor(
            [listener],
            lambda: Peer(None if secret is None else handshake_of_first(secret, topology.address)),
            self._admit,
            wait.clock,
            on_refused=self._note_stranger,
            log=log,
            patience=HELLO_PATIENCE,
            most=max(MOST_PENDING, topology.world_size),
        )

    def run(self) -> dict[Task, Connection]:
        """Run the rendezvous, until every training task has come.

        Returns:
            The connections to the other training tasks.

        Raises:
            PeerMissingError: not all tasks came in time, or a task gave up waiting.
            PeerMismatchError: the tasks' clusters differ, or two processes claim to be the same task.
            PortInUseError: a task cannot serve on its port.

        Every task that came raises the same error.
        """
        self._start = self._clock.now()
        try:
            self._wait_for_all()
            # Close it before any task hears "go": TensorFlow may need the port, and late peers are refused.
            self._listener.close()
            self._send_all("go")
            members, self._peers = self._peers, []
            return {peer.task: Connection(peer.sock, peer.frames) for peer in members}
        except Verdict as verdict:
            self._fail_all(verdict)
        finally:
            self._listener.close()
            self._acceptor.close()
            for peer in self._peers:
                peer.sock.close()

    def _wait_for_all(self) -> None:
        while missing := self._missing():
            if self._wait.deadline.passed():
                raise self._missing_error(self._wait.seconds)
            if self._wait.log_if_due(names := self._described(missing)):
                self._send_all("waiting", missing=names)
            self._acceptor.serve(self._wait.pause())

    def _read(self, peer: Peer) -> None:
        try:
            peer.receive(peer.sock.recv(peer.wanted))
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
        else:
            self._heed(peer)

    def _heed(self, peer: Peer) -> None:
        if any(message["dtrain"] == "gave up" for message in peer.messages):
            raise self._missing_error(self._clock.now() - self._start)

    def _admit(self, sock: socket.socket, peer: Peer) -> None:
        hello = peer.messages[0]
        job, index, process = hello.get("job"), hello.get("index"), hello.get("process")
        if not (isinstance(job, str) and type(index) is int and isinstance(process, str)):
            return sock.close()
        index = max(-1, min(index, _HIGHEST))  # bounds the number of digits that a message would show
        peer.sock, peer.task, peer.process = sock, Task(cleaned(job, _NAME), index), cleaned(process, 100)
        if hello["dtrain"] != "hello" or (peer.handshake and str(peer.task) != peer.handshake.peer):
            return sock.close()  # it may have proved to be another task
        self._peers.append(peer)
        self._acceptor.watch(sock, partial(self._read, peer))
        try:
            self._check(peer, hello)
        except Verdict as verdict:
            if peer.handshake is not None:
                raise
            return self._refuse(peer, verdict)
        self._send(peer, "waiting", missing=self._described(self._missing()))
        self._heed(peer)

    def _check(self, peer: Peer, hello: dict[str, Any]) -> None:
        """Raise a Verdict if a hello does not fit this job.

        A connection of an earlier process of the claimed task is dropped if that process is gone.
        """
        claimed, name = peer.task, f"{peer.task} ({peer.process})"
        if hello.get("protocol") != PROTOCOL:
            raise mismatch(f"{name} runs another version of dtrain than {self._own_name()}.")
        if isinstance(problem := hello.get("problem"), str) and problem:
            hint = "Free the port, or give that task another one."
            raise Verdict("port in use", cleaned(problem, _SHOWN), hint)
        difference = describe_difference(self._topology.jobs, hello.get("cluster"), self._own_name(), name)
        if difference and claimed == self._topology.task:
            # The peer is the first task of another job with the same address. This job continues.
            address = self._topology.address
            raise Verdict("port in use", f"{address} is in use by {self._own_name()} of another job.", "")
        if difference:
            raise mismatch(cleaned(difference, _SHOWN))
        if claimed == self._topology.task:
            raise _duplicate_task(claimed, self._process, peer.process)
        if claimed not in self._expected:
            raise mismatch(f"{name} is not a training task of this cluster.")
        for other in [*self._peers]:
            if other is not peer and other.task == claimed:
                if _is_alive(other.sock):
                    raise _duplicate_task(claimed, other.process, peer.process)
                self._drop(other)  # the task's earlier process died, and the task was restarted

    def _refuse(self, peer: Peer, verdict: Verdict) -> None:
        """Close a peer's connection, and continue the rendezvous without it.

        The peer is told the kind of the verdict alone: it may be a stranger that does not know the cluster.
        """
        self._send(peer, "error", kind=verdict.kind)
        self._drop(peer)
        if verdict.kind == "port in use" and peer.task == self._topology.task:
            return  # the first task of another job; not worth a log line
        self._note_refusal(verdict.message)

    def _note_stranger(self, peer: Peer) -> None:
        name = cleaned(peer.handshake.peer, _NAME) if peer.handshake else ""
        claimed = name if name and name.isascii() else "an unknown program"
        self._note_refusal(
            f"{claimed} does not know the secret of the job of {self._own_name()}, "
            f"or has another address for {self._topology.task}."
        )

    def _note_refusal(self, message: str) -> None:
        message = cleaned(message, _SHOWN)
        if message not in self._refused and len(self._refused) < _LOGGED:
            self._refused.append(message)
            more = "; further ones are not shown" if len(self._refused) == _LOGGED else ""
            self._log(f"a process was refused: {message}{more}")

    def _missing_error(self, seconds: float) -> Verdict:
        refused = f"These were refused: {' '.join(self._refused)}" if self._refused else ""
        return missing_error(self._described(self._missing()), seconds, refused)

    def _fail_all(self, verdict: Verdict) -> NoReturn:
        """Send a verdict to all tasks, including those that come within the next 5 s, and raise its error."""
        text = {"kind": verdict.kind, "message": verdict.message, "hint": verdict.hint}
        linger = 0.0 if verdict.kind == "missing" else min(_LINGER, self._wait.seconds)
        deadline = self._clock.deadline(linger)
        notified: set[Task] = set()
        while True:
            for peer in [*self._peers]:
                notified.add(peer.task)
                self._send(peer, "error", **text)
                self._drop(peer)
            if deadline.passed() or notified.issuperset(self._expected):
                break
            try:
                self._acceptor.serve(deadline.left())
            except Verdict:
                continue  # all tasks get the first verdict, also one that caused another
        raise verdict.error() from None

    def _missing(self) -> list[Task]:
        here = {peer.task for peer in self._peers}
        return [task for task in self._expected if task not in here]

    def _described(self, tasks: list[Task]) -> list[str]:
        return [f"{task} ({self._topology.address_of(task)})" for task in tasks]

    def _own_name(self) -> str:
        return f"{self._topology.task} ({self._process})"

    def _send_all(self, kind: str, /, **content: Any) -> None:
        for peer in self._peers:
            self._send(peer, kind, **content)

    def _send(self, peer: Peer, kind: str, /, **content: Any) -> None:
        try:
            peer.sock.settimeout(1.0)
            peer.sock.sendall(peer.frames.encode_message(kind, **content))
        except OSError:  # the peer is gone; its own time limit, or the launcher, reports that
            pass
        finally:
            peer.sock.setblocking(False)

    def _drop(self, peer: Peer) -> None:
        self._peers.remove(peer)
        self._acceptor.forget(peer.sock)
        peer.sock.close()


def describe_difference(
    mine: Mapping[str, tuple[str, ...]], other: Any, my_name: str, other_name: str
) -> str | None:
    """The first difference between two clusters, in a sentence; None if they are equal.

    Args:
        mine: this task's cluster: the addresses of each job.
        other: the other task's cluster, as decoded from JSON and not validated.
        my_name, other_name: the two tasks, in words.
    """
    if not isinstance(other, dict) or not all(_are_addresses(addresses) for addresses in other.values()):
        return f"{other_name} did not say what its cluster is."
    for job in sorted({*mine, *other}):
        ours, theirs = list(mine.get(job, ())), other.get(job, [])
        if len(ours) != len(theirs):
            return f'{my_name} has {len(ours)} task(s) of job "{job}", but {other_name} has {len(theirs)}.'
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                return f"{my_name} has {job} {index} at {our!r}, but {other_name} has it at {their!r}."
    return None


def _are_addresses(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(address, str) for address in found)


def _duplicate_task(task: Task, one: str, other: str) -> Verdict:
    return mismatch(f"Two processes say that they are {task}: {one} and {other}.")


def _is_alive(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
