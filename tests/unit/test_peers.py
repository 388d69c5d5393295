"""The connected workers of a job: their values, who is lost, and frames that no worker has sent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtrain.cluster import peer_link, peers
from dtrain.cluster.peer_link import PeerLink
from dtrain.cluster.peers import Peers
from dtrain.cluster.rendezvous_lines import Connection
from dtrain.errors import AuthenticationError, PeerMissingError
from dtrain.topology import Topology
from refusals import refused

SECONDS = 20.0
KEY = b"of the connection"


class Job:
    """Several connected workers in this process, each used by a thread of its own."""

    def __init__(self, size: int, key: bytes = KEY) -> None:
        pairs = {worker: socket.socketpair() for worker in range(1, size)}
        ends = {worker: Connection(pair[0], key) for worker, pair in pairs.items()}
        self.workers = [Peers(0, size, ends)]
        self.workers += [Peers(worker, size, {0: Connection(pair[1], key)}) for worker, pair in pairs.items()]

    def run(self, work: Callable[[Peers], Any], *who: int) -> list[Any]:
        """What each worker (by default, all) gets of its work; an exception where it raised one."""
        numbers = who or range(len(self.workers))
        results: dict[int, Any] = {}

        def one(number: int) -> None:
            try:
                results[number] = work(self.workers[number])
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
        return [results[number] for number in numbers]


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*args: Any, **options: Any) -> Job:
        made.append(Job(*args, **options))
        return made[-1]

    yield make
    for each in made:
        for worker in each.workers:
            worker.close()


@pytest.mark.parametrize("key", [KEY, b""])
def test_every_worker_gets_the_values_of_all_in_their_order(job: Callable[..., Job], key: bytes) -> None:
    values = [[b"%d of %d" % (number, worker) for number in range(50)] for worker in range(4)]
    found = job(4, key).run(lambda worker: [worker.all_gather(each) for each in values[worker.rank]])
    assert found == [[[values[w][n] for w in range(4)] for n in range(50)]] * 4


def test_large_and_empty_values(job: Callable[..., Job]) -> None:
    values = [os.urandom(3_000_000), b"", os.urandom(70_000)]
    assert job(3).run(lambda worker: worker.all_gather(values[worker.rank])) == [values] * 3


def test_a_note_is_there_before_the_next_value(job: Callable[..., Job]) -> None:
    def work(worker: Peers) -> list[bool]:
        found, complete = set(), []
        for number in range(20):
            if worker.rank:
                worker.send_to_first(b"%d" % number)
            worker.all_gather(b"")
            found.update(worker.receive_notes())
            complete.append(found >= {(other, b"%d" % n) for other in (1, 2) for n in range(number + 1)})
        return complete

    first, *others = job(3).run(work)
    assert all(first) and not any(map(any, others))


@pytest.mark.parametrize(("waits", "late"), [(0, 2), (1, 2), (1, 0)])
def test_one_that_does_not_come_in_time_is_named(job: Callable[..., Job], waits: int, late: int) -> None:
    here = job(3)
    third = 3 - waits - late
    there = threading.Thread(target=here.workers[third].all_gather, args=(b"",), daemon=True)
    there.start()
    time.sleep(0.2)
    begun = time.monotonic()
    with refused(PeerMissingError, f"Worker {late} did not reach this point within 0.5 s"):
        here.workers[waits].all_gather(b"", timeout=0.5)
    assert 0.4 < time.monotonic() - begun < 2
    here.workers[late].all_gather(b"")  # the value of the one that has given up is there
    there.join(SECONDS)
    assert not here.workers[waits]._complete  # what nobody waits for is not kept
    assert here.run(lambda worker: worker.all_gather(b"%d" % worker.rank)) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("lost", [0, 2])
def test_one_that_is_gone_ends_the_wait_of_all_at_once(job: Callable[..., Job], lost: int) -> None:
    here = job(3)
    here.run(lambda worker: worker.all_gather(b""))
    threading.Timer(0.3, here.workers[lost].close).start()
    begun = time.monotonic()
    for error in here.run(lambda worker: worker.all_gather(b""), *({0, 1, 2} - {lost})):
        assert isinstance(error, PeerMissingError) and f"lost worker {lost} (" in error.message
    assert time.monotonic() - begun < 2


def test_one_that_has_ended_after_the_last_value_is_no_loss(job: Callable[..., Job]) -> None:
    """Whoever waits elsewhere gets some seconds for what the ended worker has sent before."""
    here = job(3)

    def work(worker: Peers) -> list[bytes]:
        found = worker.all_gather(b"%d" % worker.rank)
        if worker.rank == 2:
            worker.close()
        return found

    assert here.run(work) == [[b"0", b"1", b"2"]] * 3
    for worker in here.workers[:2]:
        worker.check()


def test_no_worker_leaves_before_the_last_one(job: Callable[..., Job]) -> None:
    ended = threading.Event()

    def work(worker: Peers) -> bool:
        worker.all_gather(b"")
        if worker.rank == 1:
            time.sleep(0.5)
            ended.set()
        worker.leave()
        return ended.is_set()

    assert job(3).run(work) == [True] * 3


@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_leaves_without_one_that_is_lost(job: Callable[..., Job], lost: int) -> None:
    here = job(3)
    begun = time.monotonic()
    threading.Timer(0.3, here.workers[lost].close).start()
    here.run(Peers.leave, *({0, 1, 2} - {lost}))
    assert 0.2 < time.monotonic() - begun < 3


def test_a_worker_that_leaves_is_not_taken_for_one_at_a_barrier(job: Callable[..., Job]) -> None:
    def work(worker: Peers) -> list[bytes] | None:
        return worker.leave() if worker.rank else worker.all_gather(b"", timeout=1.0)

    first, second = job(2).run(work)
    assert isinstance(first, PeerMissingError) and second is None


def test_a_loss_ends_a_wait_elsewhere(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GRACE", 0.2)
    here = job(3)
    here.run(lambda worker: worker.all_gather(b""))
    here.workers[2].close()
    time.sleep(0.6)
    for worker in here.workers[:2]:
        with refused(PeerMissingError, "lost worker 2 (it ended its program, or was killed)", "max-restarts"):
            worker.check()


@pytest.mark.parametrize("place", ["body", "number", "size", "signature", "twice", "back to its sender"])
def test_a_frame_that_the_worker_has_not_sent_is_never_used(job: Callable[..., Job], place: str) -> None:
    """Somebody on the way changes, repeats or returns a frame."""
    near, far = socket.socketpair()
    first = Peers(0, 2, {1: Connection(near, KEY)})
    with socket.socketpair()[0] as unused:
        recorder, read = socket.socketpair()
        sender = PeerLink(0, Connection(recorder, KEY), first=False)
        sender.send(0, 0, b"")  # the hello
        hello = read.recv(1000)
        sender.send(2, 0, b"value")
        frame = bytearray(read.recv(1000))
        unused.close()
    if place == "twice":
        frame = bytearray(hello)
    elif place == "back to its sender":
        answer = PeerLink(1, Connection(read, KEY), first=True)
        answer.send(0)
        answer.send(2, 0, b"value")
        frame = bytearray(recorder.recv(1000)[-len(frame) :])
    else:
        frame[{"body": 20, "number": 8, "size": 10, "signature": -1}[place]] ^= 1
    far.sendall(hello + frame)
    problem = "its size is impossible" if place == "size" else "not signed by it"
    with refused(AuthenticationError, "Worker 1 was disconnected", problem, "docs/security.md"):
        first.all_gather(b"mine", timeout=5)
    first.close()
    for sock in (far, recorder, read):
        sock.close()


@pytest.mark.parametrize(
    ("kind", "body"),
    [(peers._ALL, b"short"), (peers._ALL, (3).to_bytes(8, "big") + b"one"), (peers._MISSING, b"x")],
)
def test_a_frame_that_cannot_be_read_ends_the_wait(kind: int, body: bytes) -> None:
    near, far = socket.socketpair()
    worker = Peers(1, 2, {0: Connection(near, b"")})
    PeerLink(1, Connection(far, b""), first=True).send(kind, 0, body)
    with refused(AuthenticationError, "Worker 0 was disconnected", "cannot be read"):
        worker.all_gather(b"", timeout=5)
    worker.close()
    far.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_ends_the_wait(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("a mistake in here")

    here = job(2)
    here.run(lambda worker: worker.all_gather(b""))
    monkeypatch.setattr(here.workers[1], "_receive", fail)
    for error in here.run(lambda worker: worker.all_gather(b"", timeout=5)):
        if isinstance(error, Exception):
            assert "this worker's own connections failed: RuntimeError('a mistake in here')" in str(error)
            break
    else:
        raise AssertionError("nobody has noticed")


def test_several_losses_at_once_are_sent_to_the_others() -> None:
    """Telling one worker of a loss may be how the loss of that worker is noticed."""
    pairs = {worker: socket.socketpair() for worker in range(1, 5)}
    first = Peers(0, 5, {worker: Connection(near, b"") for worker, (near, _) in pairs.items()})
    for _, far in pairs.values():
        PeerLink(0, Connection(far, b""), first=False).send(peers._HELLO)
    deadline = time.monotonic() + SECONDS
    while not all(link.open for link in first._links.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    with first._changed:
        for _, far in pairs.values():
            far.close()
        first._lose(1, "a test")
    with refused(PeerMissingError, "worker 1 (a test)", "worker 2", "worker 3", "worker 4"):
        first.all_gather(b"", timeout=5)
    first.close()


def test_who_is_lost_is_named_and_not_the_first_worker_that_does_not_answer() -> None:
    near, far = socket.socketpair()
    worker = Peers(1, 3, {0: Connection(near, b"")})
    first = PeerLink(1, Connection(far, b""), first=True)
    threading.Timer(1.0, first.send, (peers._LOST, 2, b"a test")).start()
    with refused(PeerMissingError, "lost worker 2 (a test)"):
        worker.all_gather(b"", timeout=0.3)
    worker.close()
    far.close()


def test_a_large_value_is_in_memory_once_for_all_workers() -> None:
    value = os.urandom(20_000_000)
    pairs = {worker: socket.socketpair() for worker in range(1, 5)}
    first = Peers(0, 5, {worker: Connection(near, KEY) for worker, (near, _) in pairs.items()})
    tracemalloc.start()
    try:
        for _, far in pairs.values():
            link = PeerLink(0, Connection(far, KEY), first=False)
            link.send(peers._HELLO)
            link.send(peers._VALUE)
        assert first.all_gather(value, timeout=SECONDS)[0] is value
        assert tracemalloc.get_traced_memory()[1] < 2 * len(value)
    finally:
        tracemalloc.stop()
        for _, far in pairs.values():
            far.close()
        first.close()


def test_another_job_closes_the_connections_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    ends = iter(pairs)
    monkeypatch.setattr(peers, "_current", None)
    monkeypatch.setattr(
        peers, "run_rendezvous", lambda topology, timeout: {1: Connection(next(ends)[0], b"")}
    )
    jobs = [Topology({"worker": (f"127.0.0.1:{port}", "127.0.0.1:9")}, "worker", 0) for port in (1, 2)]
    first = peers.connect(jobs[0])
    assert peers.connect(jobs[0]) is first
    second = peers.connect(jobs[1])
    pairs[0][1].settimeout(SECONDS)
    assert pairs[0][1].recv(1) == b"" and peers.connected() is second
    second.close()
    for _, far in pairs:
        far.close()


def test_the_system_watches_over_the_link() -> None:
    """A worker that holds Python's lock sends no sign of life, but its system answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
    link = PeerLink(1, Connection(near, KEY), first=True)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    link.close()
    assert peers._SILENT >= 300


def silent_worker(pid: int, machine: str | None = None) -> tuple[Peers, socket.socket]:
    """A first worker whose only peer has said which process it is, and says nothing more."""
    near, far = socket.socketpair()
    hello = f"{peer_link._machine() if machine is None else machine} {pid}".encode()
    first = Peers(0, 2, {1: Connection(near, b"")})
    PeerLink(0, Connection(far, b""), first=False).send(0, 0, hello)
    return first, far


@pytest.mark.parametrize("fate", ["stopped", "busy", "elsewhere"])
def test_who_is_silent_for_long(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process of this machine is lost; a busy one is not; of another machine, nobody knows."""
    for name, value in (("_CHECK_INTERVAL", 0.1), ("_STOPPED", 0.5), ("_SILENT", 1.2)):
        monkeypatch.setattr(peers, name, value)
    with subprocess.Popen(["sleep", "60"]) as process:
        if fate == "stopped":
            process.send_signal(signal.SIGSTOP)
        first, far = silent_worker(process.pid, "another" if fate == "elsewhere" else None)
        begun = time.monotonic()
        try:
            words = "did not reach" if fate == "busy" else "it has sent no sign of life for"
            with refused(PeerMissingError, words):
                first.all_gather(b"", timeout=2.5)
            seconds = time.monotonic() - begun
            assert {"stopped": 0.4, "busy": 2.4, "elsewhere": 1.1}[fate] < seconds
            assert seconds < {"stopped": 1.1, "busy": 4, "elsewhere": 2.2}[fate]
        finally:
            first.close()
            far.close()
            process.kill()
