"""The server of the rounds and its clients, over real sockets, without TensorFlow."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dtrain.base.quantization import Quantization
from dtrain.errors import ConfigurationError, PeerMissingError
from dtrain.process_group.quorum_client import JoinedRound, QuorumClient, RoundMean
from dtrain.process_group.quorum_messages import Agreed
from dtrain.process_group.quorum_server import QuorumServer
from dtrain.process_group.secret import Secret
from given_clock import GivenClock
from processes import wait_until

SECRET = Secret(b"k" * 32, "a test")
AGREED = Agreed(10, "changes", 2, 1, "float32", 0, 8)


def got(future: Future[Any]) -> Any:
    """What a call in a thread has returned."""
    return future.result(60)  # wall clock: without it, a failure hangs


class Jobs:
    """A server, and calls of its clients in threads."""

    def __init__(self) -> None:
        self.clock = GivenClock()
        self.lines: list[str] = []
        self.server = QuorumServer(SECRET, 3, 2, clock=self.clock, say=self.lines.append)
        self.pool = ThreadPoolExecutor(8)
        self.workers = [self.client(rank) for rank in range(3)]

    def client(self, rank: int) -> QuorumClient:
        return QuorumClient(self.server.address, SECRET, rank, 3)

    def begin(self, agreed: Agreed = AGREED) -> list[JoinedRound]:
        """All join, and the first one gives its state."""
        joins = [self.pool.submit(worker.join, 0, agreed) for worker in self.workers]
        assert got(joins[0]) == JoinedRound(0)
        self.workers[0].give(0, (0, "start", b"8 bytes."))
        return [got(join) for join in joins]

    def sent(self, worker: QuorumClient, number: int, *values: float, **how: Any) -> Future[Any]:
        content = np.array(values, np.float32).tobytes()
        given: Callable[[], Any] = how.get("given", lambda: (number, "asked", b"8 bytes!"))
        return self.pool.submit(worker.contribute, 0, number, content, 10, joinable=True, given=given)


@pytest.fixture
def job() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.server.close()
    for worker in made.workers:
        worker._link.close()
    made.pool.shutdown()


def mean_of(future: Future[Any]) -> tuple[list[float], bool]:
    mean, over = got(future)
    assert isinstance(mean, RoundMean) and over is None
    return mean.vector.view(np.float32).tolist(), mean.give


def test_rounds_a_lost_worker_and_the_end(job: Jobs) -> None:
    first, second, third = job.workers
    assert job.begin()[1:] == [JoinedRound(0, "start", b"8 bytes.")] * 2
    round_0 = [job.sent(worker, 0, rank, 1, 2) for rank, worker in enumerate(job.workers)]
    assert [mean_of(sent) for sent in round_0] == [([1, 1, 2], False)] * 3
    # The third is lost within a round, and joins after it.
    job.server.lose(2)
    third._link.close()
    job.workers[2] = third = job.client(2)
    joins = job.pool.submit(third.join, 0, AGREED)
    wait_until(lambda: 2 in job.server._rules.joining)
    assert [mean_of(s) for s in (job.sent(first, 1, 0, 0, 0), job.sent(second, 1, 4, 4, 4))] == [
        ([2, 2, 2], True),
        ([2, 2, 2], False),
    ]
    first.give(0, (2, "after", b"bytes: 8"))
    assert got(joins) == JoinedRound(2, "after", b"bytes: 8")
    # Logs are weighted by examples.
    logs = [
        job.pool.submit(worker.mean_of_logs, 0, 2, ["loss"], [float(rank)], rank * 10)
        for rank, worker in enumerate(job.workers)
    ]
    assert [got(log)[0].vector.tolist() for log in logs] == [[5 / 3]] * 3
    # The second ends: its state is the last one, which the third gets in place of a mean.
    report = second.end(0, lambda: (3, "last", b"the last"))
    assert (report["rounds"], report["contributions"], report["missed"]) == (2, 5, 1)
    assert got(job.sent(third, 3, 0, 0, 0)) == (None, JoinedRound(None, "last", b"the last"))
    assert first.end(0, lambda: (3, "not", b"asked for")) == report
    assert third.join(0, AGREED) == JoinedRound(None, "last", b"the last")


def test_a_slow_worker_is_late_and_a_round_below_its_quorum_asks_for_a_state(job: Jobs) -> None:
    first, second, third = job.workers
    job.begin()
    sent = job.sent(first, 0, 2, 2, 2), job.sent(second, 0, 4, 4, 4)
    wait_until(lambda: len(job.server._rules.came) == 2)
    assert not sent[0].done()
    job.clock.pass_by(5)
    assert [mean_of(one)[0] for one in sent] == [[3, 3, 3]] * 2
    assert got(job.sent(third, 0, 9, 9, 9)) == (None, None)  # late
    job.server.lose(1)
    joins = job.pool.submit(third.join, 0, AGREED)
    waits = job.sent(first, 1, 1, 1, 1)
    assert got(joins) == JoinedRound(1, "asked", b"8 bytes!")
    assert mean_of(job.sent(third, 1, 3, 3, 3))[0] == mean_of(waits)[0] == [2, 2, 2]


def test_what_is_not_finite_is_dropped_unless_all_have_diverged(job: Jobs) -> None:
    job.begin()
    values = (1, float("nan"), 3)
    sent = [job.sent(worker, 0, value, 0, 0) for worker, value in zip(job.workers, values, strict=True)]
    assert mean_of(sent[0])[0] == mean_of(sent[2])[0] == [2, 0, 0]
    assert got(sent[1]) == (None, None)
    assert "worker 1" in job.lines[0]
    sent = [job.sent(job.workers[rank], 1, float("inf"), 0, 0) for rank in (0, 2)]
    assert mean_of(sent[0])[0][0] == float("inf")


def test_few_bits(job: Jobs) -> None:
    job.begin(Agreed(10, "changes", 300, 1, "float32", 8, 8))
    changes = np.linspace(-1, 1, 300).astype(np.float32)
    content = Quantization(8).encode(changes, (0,)).tobytes() + np.float32([7]).tobytes()
    sent = [
        job.pool.submit(worker.contribute, 0, 0, content, 1, joinable=True, given=lambda: (0, "", b""))
        for worker in job.workers
    ]
    mean, _ = got(sent[0])
    np.testing.assert_allclose(mean.vector.view(np.float32), [*changes, 7], atol=1 / 127)


def test_another_model_is_refused_and_another_size_ends_the_connection(job: Jobs) -> None:
    joins = job.pool.submit(job.workers[0].join, 0, AGREED)
    wait_until(lambda: bool(job.server._rules.joining))
    with pytest.raises(ConfigurationError, match="its changes is 5"):
        job.workers[1].join(0, Agreed(10, "changes", 5, 1, "float32", 0, 8))
    others = [job.pool.submit(worker.join, 0, AGREED) for worker in job.workers[1:]]
    got(joins)
    job.workers[0].give(0, (0, "", b"8 bytes."))
    for other in others:
        got(other)
    with pytest.raises(PeerMissingError, match="lost the server"):
        job.workers[0].give(0, (0, "", b"9 bytes.."))
    with pytest.raises(PeerMissingError):
        got(job.sent(job.workers[1], 0, 1.0))


def test_who_does_not_know_the_secret_gets_nothing(job: Jobs) -> None:
    with pytest.raises(PeerMissingError):
        QuorumClient(job.server.address, Secret(b"x" * 32, "another"), 0, 3)
    host, port = job.server.address.rsplit(":", 1)
    with socket.create_connection((host.strip("[]"), int(port))) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
        assert len(sock.recv(1000)) <= 32  # a challenge
    with pytest.raises(PeerMissingError):
        job.client(7).join(0, AGREED)  # no worker of this number


def test_broadcast_and_barrier_are_kept_for_who_is_started_again(job: Jobs) -> None:
    first, second, third = job.workers
    asked = job.pool.submit(second.meet, None, "broadcast")
    assert first.meet({"seed": 7}, "broadcast") == got(asked) == {"seed": 7}
    barriers = [job.pool.submit(worker.meet, None, "barrier") for worker in (first, second)]
    wait_until(lambda: len(job.server._met.get(1, ())) == 2)
    assert not barriers[0].done()
    assert third.meet(None, "broadcast") == {"seed": 7}
    third.meet(None, "barrier")
    assert [got(barrier) for barrier in barriers] == [None, None]
    again = job.client(0)
    assert again.meet({"seed": 8}, "broadcast") == {"seed": 7}
    again._link.close()
    third.in_fit = True
    with pytest.raises(ConfigurationError, match="broadcast was called in fit"):
        third.meet(None, "broadcast")
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        second.meet(object(), "broadcast")


def test_who_left_a_fit_by_an_error_waits_for_the_others_before_the_next(job: Jobs) -> None:
    first, second, third = job.workers
    job.begin()
    joins = job.pool.submit(third.join, 1, AGREED)
    wait_until(lambda: job.server._rules.members == {0, 1})
    sent = [job.sent(worker, 0, 1, 1, 1) for worker in (first, second)]
    assert [mean_of(one)[0] for one in sent] == [[1, 1, 1]] * 2
    first.end(0, lambda: (1, "last", b"the last"))
    second.end(0, lambda: (1, "", b""))
    others = [job.pool.submit(worker.join, 1, AGREED) for worker in (first, second)]
    assert got(others[0]) == JoinedRound(0)
    first.give(1, (0, "next", b"8 bytes."))
    assert got(joins) == got(others[1]) == JoinedRound(0, "next", b"8 bytes.")
