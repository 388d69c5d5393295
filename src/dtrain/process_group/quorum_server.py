"""The server of the rounds of a job with a quorum: it averages what workers send, and hands states on.

The launcher holds it. A thread serves each connection; the rules (`quorum_rules.py`) decide. It knows vectors
and bytes: what they are is the workers' matter (`engine/synchronisation/quorum_rounds.py`).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.base.clock import REAL, Clock
from dtrain.base.counts import parse_count
from dtrain.base.quantization import Quantization
from dtrain.base.tcp import loopback_host
from dtrain.process_group.acceptor import MOST_PENDING, Acceptor
from dtrain.process_group.proof import Handshake
from dtrain.process_group.quorum_messages import (
    PURPOSE,
    SERVER,
    Agreed,
    AskState,
    Begin,
    BrokenLinkError,
    Contribute,
    Ended,
    EndFit,
    Give,
    Join,
    JoinRefused,
    Late,
    Logs,
    Mean,
    Meet,
    MessageSocket,
    Met,
    Over,
    Request,
    Take,
    Taken,
)
from dtrain.process_group.quorum_report import QuorumReport
from dtrain.process_group.quorum_rules import GRACE, QuorumRules
from dtrain.process_group.secret import Secret

_LOOK = 0.1  # seconds between two looks at the clock while a round may end by it


@dataclass(frozen=True)
class _State:
    """A state that a worker has given: text for the workers, and the bytes of its variables."""

    about: str
    content: bytes


class QuorumServer:
    """Serves the rounds of one job, on this machine's loopback interface.

    Args:
        secret: the job's; who does not know it cannot connect.
        size: the number of workers.
        quorum: the fewest contributions of a round.
        grace: as of `QuorumRules`.
        clock: the clock of all limits.
        say: shows a line to the user.

    Attributes:
        address: where workers connect, as `host:port`.
        report: what the rounds have used.
    """

    _joinable = True  # whether others can join after the present round, and at its beginning

    def __init__(
        self,
        secret: Secret,
        size: int,
        quorum: int,
        *,
        grace: float = GRACE,
        clock: Clock = REAL,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._size, self._say = size, say
        self._rules = QuorumRules(size, quorum, grace=grace, clock=clock)
        self.report = QuorumReport(size, quorum, clock)
        self._changed = threading.Condition()
        self._links: dict[int, MessageSocket] = {}
        self._agreed: Agreed | None = None
        self._sent: dict[int, tuple[int, np.ndarray, tuple[str, ...] | None]] = {}  # of the present round
        self._answers: dict[int, tuple[Any, bytes]] = {}  # that wait for the threads of their workers
        self._last: dict[int, _State] = {}  # the last state of the fit that has ended last, by its number
        self._ends: dict[int, int] = {}  # by the number of a fit, the worker that is to give its last state
        self._met: dict[int, dict[int, str]] = {}  # by number, what each worker has sent
        self._closed = False
        host = loopback_host()
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        self._listener = socket.create_server((host.strip("[]"), 0), family=family, backlog=max(128, size))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._acceptor = Acceptor(
            [self._listener],
            lambda: Handshake(secret, PURPOSE, SERVER),
            self._take,
            clock,
            log=lambda line: say(f"While workers connect, {line}"),
            most=max(MOST_PENDING, size),
        )
        threading.Thread(target=self._acceptor.run, name="dtrain-quorum", daemon=True).start()

    def close(self) -> None:
        """Closes all connections."""
        self._acceptor.stop()
        with self._changed:
            self._closed = True
            links, self._links = [*self._links.values()], {}
            self._changed.notify_all()
        for link in links:
            link.close()
        self._listener.close()

    def lose(self, worker: int, *, forever: bool = False) -> None:
        """The process of a worker has ended; `forever` if it is not started again."""
        with self._changed:
            link = self._links.pop(worker, None)
            self._lose(worker, forever=forever)
        if link is not None:
            link.close()

    def _lose(self, worker: int, *, forever: bool = False) -> None:
        if worker in self._rules.members and not self._rules.over:
            self.report.leaves(worker)
        self._rules.lose(worker, forever=forever)
        self._sent.pop(worker, None)
        self._answers.pop(worker, None)
        self._ends = {fit: other for fit, other in self._ends.items() if other != worker}
        self._advance()
        self._changed.notify_all()

    # --- connections

    def _take(self, sock: socket.socket, handshake: Handshake) -> None:
        """A process that knows the job's secret has connected."""
        number = parse_count(handshake.peer.removeprefix("worker "))
        if number is None or number >= self._size:
            sock.close()
            return
        link = MessageSocket(sock, handshake.key, Request, connected=False)
        with self._changed:
            before = self._links.pop(number, None)
            if before is not None:
                self._lose(number)
            self._links[number] = link
        if before is not None:
            before.close()
        name = f"dtrain-quorum-{number}"
        threading.Thread(target=self._serve, args=(number, link), name=name, daemon=True).start()

    def _serve(self, worker: int, link: MessageSocket) -> None:
        """Answers the requests of one worker, until its connection is lost."""
        why = ""
        try:
            while True:
                request, content = link.receive()
                link.send(*self._answer(worker, link, request, content))
        except (_Gone, ConnectionError):
            pass
        except (OSError, ValueError) as error:
            why = str(error)
        with self._changed:
            current = self._links.get(worker) is link
            if current:
                del self._links[worker]
                self._lose(worker)
        if current and why and not self._closed:
            self._say(f"The connection of worker {worker} to the rounds was closed: {why}.")
        link.close()

    # --- requests

    def _answer(self, worker: int, link: MessageSocket, request: Any, content: bytes) -> tuple[Any, bytes]:
        if isinstance(request, Join):
            return self._join(worker, link, request)
        if isinstance(request, Contribute | Logs):
            return self._contribute(worker, link, request, content)
        if isinstance(request, Give):
            return self._give(worker, request, content)
        return self._meet(worker, link, request) if isinstance(request, Meet) else self._end(worker, request)

    def _join(self, worker: int, link: MessageSocket, request: Join) -> tuple[Any, bytes]:
        with self._changed:
            self._await_end_before(worker, link, request.fit)
            if self._agreed is None or request.fit > self._rules.fit:
                self._agreed, self._sent = request.agreed, {}
            if request.fit == self._rules.fit and request.agreed != self._agreed:
                return JoinRefused(_difference(worker, request.agreed, self._agreed)), b""
            self._answers.pop(worker, None)
            if not self._rules.join(worker, request.fit):
                return self._over(request.fit)
            return self._wait(worker, link, request.fit)

    def _await_end_before(self, worker: int, link: MessageSocket, fit: int) -> None:
        """Waits until a `fit` may begin: a worker that has left the one before by an error is early.

        Raises:
            _Gone: the worker has ended, or has another connection.
        """
        rules = self._rules
        if fit > rules.fit and not rules.over:
            self._lose(worker)
        while fit > rules.fit and not rules.over and (rules.members or rules.joining):
            if self._closed or self._links.get(worker) is not link:
                raise _Gone
            self._changed.wait(_LOOK)

    def _contribute(
        self, worker: int, link: MessageSocket, request: Contribute | Logs, content: bytes
    ) -> tuple[Any, bytes]:
        names = tuple(request.names) if isinstance(request, Logs) else None
        with self._changed:
            if request.fit < self._rules.fit or self._rules.over:
                return self._over(request.fit)
            vector = self._vector(content, names)
            if not self._rules.contribute(worker, request.fit, request.round, needs_quorum=names is None):
                return Late(), b""
            self._joinable = not isinstance(request, Contribute) or request.joinable
            self._sent[worker] = request.rows, vector, names
            return self._wait(worker, link, request.fit)

    def _give(self, worker: int, request: Give, content: bytes) -> tuple[Any, bytes]:
        with self._changed:
            known = self._agreed is not None and len(content) == self._agreed.state
            if not known and request.fit == self._rules.fit:
                raise BrokenLinkError(f"its state has {len(content)} bytes")
            state = _State(request.about, content)
            if self._ends.get(request.fit) == worker:
                del self._ends[request.fit]
                self._last = {request.fit: state}
            elif request.fit == self._rules.fit and not self._rules.over:
                for other in self._rules.give(worker, request.round) or ():
                    self.report.is_back(other)
                    self._answers[other] = Take(request.round, state.about), state.content
            self._changed.notify_all()
            return Taken(), b""

    def _end(self, worker: int, request: EndFit) -> tuple[Any, bytes]:
        with self._changed:
            self._rules.end_fit(request.fit)
            gives = request.fit not in (*self._last, *self._ends) and request.fit == self._rules.fit
            if gives:
                self._ends[request.fit] = worker
            self.report.settle()
            self._changed.notify_all()
            return Ended(gives, json.dumps(self.report.as_record())), b""

    def _over(self, fit: int) -> tuple[Any, bytes]:
        """The answer where a `fit` is over: its last state, which its first worker gives in a moment."""
        self._changed.wait_for(lambda: fit not in self._ends or self._closed)
        last = self._last.get(fit)
        return (Over(""), b"") if last is None else (Over(last.about), last.content)

    def _meet(self, worker: int, link: MessageSocket, request: Meet) -> tuple[Any, bytes]:
        """A broadcast or barrier: what was there before is kept for workers that are started again."""
        with self._changed:
            there = self._met.setdefault(request.number, {})
            there.setdefault(worker, request.text)
            self._changed.notify_all()
            while self._links.get(worker) is link:
                awaited = {*range(self._size if request.barrier else 1)} - there.keys()
                if not awaited - self._rules.absent:
                    return (Met(there[0]), b"") if 0 in there else (JoinRefused("Worker 0 is gone."), b"")
                self._changed.wait(_LOOK)
            raise _Gone

    def _wait(self, worker: int, link: MessageSocket, fit: int) -> tuple[Any, bytes]:
        """The answer of a worker that waits for others in a `fit`, once there is one.

        Raises:
            _Gone: the worker has ended, or has another connection.
        """
        self._advance()
        while worker not in self._answers:
            if self._closed or self._links.get(worker) is not link:
                raise _Gone
            if self._rules.over or fit < self._rules.fit:
                return self._over(fit)
            if worker == min(self._rules.members, default=None) and self._asks_within_round():
                self._changed.release()
                try:
                    link.send(AskState())
                    request, content = link.receive()
                finally:
                    self._changed.acquire()
                if not isinstance(request, Give):
                    raise BrokenLinkError("it gave no state")
                self._give(worker, request, content)
                continue
            self._changed.wait(_LOOK)
            self._advance()
        return self._answers.pop(worker)

    def _asks_within_round(self) -> bool:
        """Whether the first member gives its state while it waits: workers that the round lacks need it."""
        rules = self._rules
        logs = any(names is not None for _, _, names in self._sent.values())
        if logs or len(rules.came) >= rules.fewest:
            return False
        return rules.ask(waiting=True) is not None

    # --- rounds

    def _advance(self) -> None:
        """Does what the rules say is due now; the caller holds the lock."""
        beginner = self._rules.beginner()
        if beginner is not None:
            self._answers[beginner] = Begin(), b""
            self.report.is_back(beginner)
            self._changed.notify_all()
        if self._rules.is_complete():
            self._end_round()
            self._changed.notify_all()

    def _end_round(self) -> None:
        sent = dict(sorted(self._sent.items()))
        self._sent = {}
        logs = next(iter(sent.values()))[2]
        finite = {worker for worker, (_, vector, _) in sent.items() if np.isfinite(vector).all()}
        # Where all have diverged, the mean shows it, as it does without a quorum.
        used = [w for w in sent if sent[w][2] == logs and (logs is not None or w in finite or not finite)]
        dropped = [worker for worker in sent if worker not in used]
        self._rules.came.difference_update(dropped)
        behind = self._rules.end_round()
        if logs is None:
            self.report.count((sent[w][0] for w in used), late=len(behind))
        rows = [sent[worker][0] for worker in used]
        vectors = [sent[worker][1] for worker in used]
        mean = _weighted(vectors, rows) if logs is not None else _mean(vectors)
        giver = self._rules.ask() if self._joinable else None
        content = mean.tobytes()
        for worker in used:
            self._answers[worker] = Mean(len(used), sum(rows), worker == giver, worker == used[0]), content
        for worker in dropped:
            self._answers[worker] = Late(), b""
            if worker not in finite:
                self._say(f"What worker {worker} sent is not finite: it takes the others' weights.")
        for worker in behind:
            self.report.leaves(worker)

    def _vector(self, content: bytes, names: tuple[str, ...] | None) -> np.ndarray:
        """The numbers that a worker has sent.

        Raises:
            BrokenLinkError: they are not as many as was agreed.
        """
        if names is not None:
            if len(content) != 8 * len(names):
                raise BrokenLinkError(f"its logs have {len(content)} bytes")
            return np.frombuffer(content, np.float64)
        agreed = self._agreed
        if agreed is None:
            raise BrokenLinkError("it has not joined")
        dtype = np.dtype(agreed.dtype)
        packed = agreed.changes * dtype.itemsize
        if agreed.bits:
            packed = Quantization(agreed.bits).bytes_of(agreed.changes)
        if len(content) != packed + agreed.further * dtype.itemsize:
            raise BrokenLinkError(f"what it sent has {len(content)} bytes")
        if not agreed.bits:
            return np.frombuffer(content, dtype)
        few = Quantization(agreed.bits).decode(np.frombuffer(content[:packed], np.uint8), agreed.changes)
        return np.concatenate([few.astype(dtype), np.frombuffer(content[packed:], dtype)])


class _Gone(Exception):  # noqa: N818 - it ends a thread, and is no error
    """A worker has ended, or has another connection."""


def _mean(vectors: list[np.ndarray]) -> np.ndarray:
    """The mean, summed in the order of the workers."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total / total.dtype.type(len(vectors))


def _weighted(vectors: list[np.ndarray], rows: list[int]) -> np.ndarray:
    """The mean of logs, weighted by examples."""
    shares = rows if sum(rows) else [1] * len(rows)
    return np.average(np.stack(vectors), axis=0, weights=shares)


def _difference(worker: int, its: Agreed, others: Agreed) -> str:
    for name in Agreed.__dataclass_fields__:
        mine, theirs = getattr(its, name), getattr(others, name)
        if mine != theirs:
            return f"Worker {worker} has another model or hook: its {name} is {mine}, the others' {theirs}."
    return f"Worker {worker} has another model or hook."
