"""The first training task's side of the rendezvous: collects all tasks and checks that their clusters agree.

It serves one rendezvous on a listening socket and closes the socket. It does not use TensorFlow, and ignores
what other programs send to the port. It tells nothing about the job to a process that has not proved the
secret.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dtrain.base.clock import Deadline
from dtrain.base.plain_text import cleaned
from dtrain.base.tcp import accept
from dtrain.environments.topology import Task, Topology
from dtrain.process_group.logged_wait import LoggedWait
from dtrain.process_group.proof import Handshake, ProofError
from dtrain.process_group.rendezvous_verdict import (
    Connection,
    Verdict,
    handshake_of_first,
    mismatch,
    missing_error,
)
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import PROTOCOL, ForgedFrameError, SignedFrames

HELLO_PATIENCE = 5.0  # seconds that each side gives the other for its first message
_LINGER = 5.0  # seconds that the first task stays after a failure, to tell late tasks the reason
_UNIDENTIFIED = 64  # connections without a hello that may be open; of more, the oldest are closed
_LOGGED = 10  # refusals that are logged, and repeated in the error if the rendezvous fails
_HIGHEST = 1_000_000  # an upper bound of task indices
_SHOWN = 400  # characters shown of a refused process's text
_NAME = 40  # characters shown of the name of a task


@dataclass
class Peer:
    """A connection to the first task; `task` is None until the peer has sent a hello that fits this job."""

    sock: socket.socket
    hello_until: Deadline
    handshake: Handshake | None
    frames: SignedFrames | None = None  # None before the proof
    task: Task | None = None
    process: str = ""


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
        self._secret = secret
        self._listener = listener
        self._process = process
        self._wait = wait
        self._clock = wait.clock
        self._log = log
        self._start = 0.0
        self._peers: dict[socket.socket, Peer] = {}
        self._refused: list[str] = []
        self._expected = [t for t in topology.training_tasks() if t != topology.task]
        self._selector = selectors.DefaultSelector()

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
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            self._wait_for_all()
            # Close it before any task hears "go": TensorFlow may need the port, and late peers are refused.
            self._close_listener()
            self._send_all("go")
            return self._take_connections()
        except Verdict as verdict:
            self._fail_all(verdict)
        finally:
            self._close_listener()
            self._selector.close()
            for peer in self._peers.values():
                peer.sock.close()

    def _take_connections(self) -> dict[Task, Connection]:
        members = [peer for peer in self._peers.values() if peer.task is not None]
        for peer in members:
            del self._peers[peer.sock]
        return {
            peer.task: Connection(peer.sock, peer.frames)
            for peer in members
            if peer.task is not None and peer.frames is not None
        }

    def _wait_for_all(self) -> None:
        while missing := self._missing():
            if self._wait.deadline.passed():
                raise self._missing_error(self._wait.seconds)
            if self._wait.log_if_due(names := self._described(missing)):
                self._send_all("waiting", missing=names)
            self._serve(self._wait.pause())

    def _serve(self, seconds: float) -> None:
        for key, _ in self._selector.select(timeout=max(0.0, min(seconds, 1.0))):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._peers:  # handling an earlier event may have closed this connection
                self._read(self._peers[key.data])
        for peer in list(self._peers.values()):
            if peer.task is None and peer.hello_until.passed():
                self._drop(peer)

    def _accept(self) -> None:
        sock = accept(self._listener, self._log, self._clock)
        if sock is None:
            self._drop_unidentified(most=max(0, len(self._unidentified()) - 1))
            return
        sock.setblocking(False)
        peer = Peer(sock, self._clock.deadline(HELLO_PATIENCE), None)
        if self._secret is None:
            peer.frames = SignedFrames(None, connected=False)
        else:
            peer.handshake = handshake_of_first(self._secret, self._topology.address)
        self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ, data=sock)
        self._drop_unidentified(most=max(_UNIDENTIFIED, self._topology.world_size))

    def _unidentified(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.task is None]

    def _drop_unidentified(self, most: int) -> None:
        """Close the oldest connections without a hello, down to `most`; a task of the job connects again."""
        unidentified = self._unidentified()
        for peer in unidentified[: max(0, len(unidentified) - most)]:
            self._drop(peer)

    def _read(self, peer: Peer) -> None:
        limit = 65536 if peer.handshake is None or peer.handshake.proved else peer.handshake.wanted
        try:
            chunk = peer.sock.recv(limit)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if peer.frames is None and peer.handshake is not None:
            self._receive_proof(peer, peer.handshake, chunk)
        elif peer.frames is not None:
            self._receive_messages(peer, peer.frames, chunk)

    def _receive_proof(self, peer: Peer, handshake: Handshake, chunk: bytes) -> None:
        try:
            peer.sock.sendall(handshake.receive(chunk))  # the empty send buffer takes it
        except ProofError:
            name = cleaned(handshake.peer, _NAME)
            claimed = name if name and name.isascii() else "an unknown program"
            if chunk:
                self._note_refusal(
                    f"{claimed} does not know the secret of the job of {self._own_name()}, "
                    f"or has another address for {self._topology.task}."
                )
            self._drop(peer)
        except OSError:
            self._drop(peer)
        else:
            if handshake.proved:
                peer.frames = SignedFrames(handshake.key, connected=False)

    def _receive_messages(self, peer: Peer, frames: SignedFrames, chunk: bytes) -> None:
        try:
            for message in frames.decode_messages(chunk):
                self._handle(peer, message)
                if peer.sock not in self._peers:
                    return
        except ForgedFrameError:
            chunk = b""
        if not chunk:
            self._drop(peer)

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["dtrain"] == "gave up" and peer.task is not None:
            raise self._missing_error(self._clock.now() - self._start)
        if message["dtrain"] != "hello" or peer.task is not None:
            return
        job, index, process = message.get("job"), message.get("index"), message.get("process")
        if not (isinstance(job, str) and type(index) is int and isinstance(process, str)):
            return
        index = max(-1, min(index, _HIGHEST))  # bounds the number of digits that a message would show
        claimed = Task(cleaned(job, _NAME), index)
        if peer.handshake is not None and str(claimed) != peer.handshake.peer:
            return  # it has proved to be another task
        peer.process = cleaned(process, 100)
        try:
            self._check(peer, claimed, message)
        except Verdict as verdict:
            if peer.handshake is not None:
                peer.task = claimed
                raise
            self._refuse(peer, claimed, verdict)
        else:
            peer.task = claimed
            self._send(peer, "waiting", missing=self._described(self._missing()))

    def _check(self, peer: Peer, claimed: Task, message: dict[str, Any]) -> None:
        """Raise a Verdict if a hello does not fit this job.

        A connection of an earlier process of the claimed task is dropped if that process is gone.
        """
        name = f"{claimed} ({peer.process})"
        if message.get("protocol") != PROTOCOL:
            raise mismatch(f"{name} runs another version of dtrain than {self._own_name()}.")
        if isinstance(problem := message.get("problem"), str) and problem:
            hint = "Free the port, or give that task another one."
            raise Verdict("port in use", cleaned(problem, _SHOWN), hint)
        difference = describe_difference(self._topology.jobs, message.get("cluster"), self._own_name(), name)
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
        for other in list(self._peers.values()):
            if other is not peer and other.task == claimed:
                if _is_alive(other.sock):
                    raise _duplicate_task(claimed, other.process, peer.process)
                self._drop(other)  # the task's earlier process died, and the task was restarted

    def _refuse(self, peer: Peer, claimed: Task, verdict: Verdict) -> None:
        """Close a peer's connection, and continue the rendezvous without it.

        The peer is told the kind of the verdict alone: it may be a stranger that does not know the cluster.
        """
        self._send(peer, "error", kind=verdict.kind)
        self._drop(peer)
        if verdict.kind == "port in use" and claimed == self._topology.task:
            return  # the first task of another job; not worth a log line
        self._note_refusal(verdict.message)

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
            for peer in [g for g in self._peers.values() if g.task is not None]:
                notified.add(peer.task or self._topology.task)
                self._send(peer, "error", **text)
                self._drop(peer)
            if deadline.passed() or notified.issuperset(self._expected):
                break
            try:
                self._serve(deadline.left())
            except Verdict:
                continue  # all tasks get the first verdict, also one that caused another
        raise verdict.error() from None

    def _missing(self) -> list[Task]:
        here = {peer.task for peer in self._peers.values()}
        return [task for task in self._expected if task not in here]

    def _described(self, tasks: list[Task]) -> list[str]:
        return [f"{task} ({self._topology.address_of(task)})" for task in tasks]

    def _own_name(self) -> str:
        return f"{self._topology.task} ({self._process})"

    def _send_all(self, kind: str, /, **content: Any) -> None:
        for peer in list(self._peers.values()):
            if peer.task is not None:
                self._send(peer, kind, **content)

    def _send(self, peer: Peer, kind: str, /, **content: Any) -> None:
        if peer.frames is None:
            return
        try:
            peer.sock.settimeout(1.0)
            peer.sock.sendall(peer.frames.encode_message(kind, **content))
        except OSError:  # the peer is gone; its own time limit, or the launcher, reports that
            pass
        finally:
            peer.sock.setblocking(False)

    def _drop(self, peer: Peer) -> None:
        if self._peers.pop(peer.sock, None) is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()


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
