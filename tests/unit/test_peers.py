"""The connected workers of a job: their values, who is lost, and frames that no worker has sent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dtrain.environments.topology import Topology
from dtrain.errors import AuthenticationError, PeerMissingError
from dtrain.process_group import peer_connections, peer_link, peers
from dtrain.process_group.peer_link import PeerLink
from dtrain.process_group.peers import Peers
from dtrain.process_group.secret import Secret
from given_clock import GivenClock
from in_threads import SECONDS, start_in_threads
from peer_jobs import KEY, PeerJob, connection
from processes import wait_until
from refusals import refused


def peer_at(sock: socket.socket, key: Secret | None, *, first: bool) -> PeerLink:
    """A bare link of the first worker, or of the other one; the number of its peer does not matter."""
    return PeerLink(int(first), connection(sock, key, first=first), first=first)


class Job(PeerJob):
    """Several connected workers in this process, each used by a thread of its own, on one given clock."""

    def __init__(self, size: int, key: Secret | None = KEY) -> None:
        super().__init__(size, key)

    def run(self, work: Callable[[Peers], Any], *who: int) -> list[Any]:
        """What each worker (by default, all) gets of its work; an exception where it raised one."""
        return self.start(work, *who)()

    def start(self, work: Callable[[Peers], Any], *who: int) -> Callable[[], list[Any]]:
        """As `run`, but returns at once; the returned function waits."""
        numbers = who or range(len(self.workers))
        wait = start_in_threads({number: partial(work, self.workers[number]) for number in numbers})
        return lambda: [*wait().values()]

    def wait_for(self, number: int, *workers: int) -> None:
        """Waits until these workers wait for the values of a round, and the first worker has their values."""
        for worker in workers:
            wait_until(lambda worker=worker: self.workers[worker]._round > number)
        first = self.workers[0]
        wait_until(lambda: bool(first._lost) or set(workers) <= first._values.get(number, {}).keys())


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


@pytest.mark.parametrize("key", [KEY, None])
def test_every_worker_gets_the_values_of_all_in_their_order(
    job: Callable[..., Job], key: Secret | None
) -> None:
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
    there = here.start(lambda worker: worker.all_gather(b""), third)
    waiting = here.start(lambda worker: worker.all_gather(b"", timeout=600.0), waits)
    here.wait_for(0, waits, third)
    here.clock.pass_by(600.0)
    (error,) = waiting()
    assert isinstance(error, PeerMissingError)
    assert f"Worker {late} did not reach this point within 600 s" in error.message
    here.workers[late].all_gather(b"")  # the value of the one that has given up is there
    there()
    assert not here.workers[waits]._complete  # what nobody waits for is not kept
    assert here.run(lambda worker: worker.all_gather(b"%d" % worker.rank)) == [[b"0", b"1", b"2"]] * 3


def test_who_waits_with_a_limit_waits_until_it_is_over(job: Callable[..., Job]) -> None:
    here = job(2)
    waiting = here.start(lambda worker: worker.all_gather(b"", timeout=600.0), 0)
    here.wait_for(0, 0)
    here.clock.pass_by(599.0)
    assert here.run(lambda worker: worker.all_gather(b""), 1) == waiting() == [[b"", b""]]


@pytest.mark.parametrize("lost", [0, 2])
def test_one_that_is_gone_ends_the_wait_of_all_at_once(job: Callable[..., Job], lost: int) -> None:
    here = job(3)
    here.run(lambda worker: worker.all_gather(b""))
    others = {0, 1, 2} - {lost}
    waiting = here.start(lambda worker: worker.all_gather(b""), *others)
    here.wait_for(1, *others)
    here.workers[lost].close()
    for error in waiting():  # the clock stands still: they wait for no limit
        assert isinstance(error, PeerMissingError) and f"lost worker {lost} (" in error.message


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
    here = job(3)
    ended, left = threading.Event(), threading.Event()

    def work(worker: Peers) -> bool:
        worker.all_gather(b"")
        if worker.rank == 1:
            here.wait_for(peers._LAST_ROUND, 0, 2)
            assert not left.wait(0.05)
            ended.set()
        worker.leave()
        left.set()
        return ended.is_set()

    assert here.run(work) == [True] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_waits_five_seconds_for_the_others(job: Callable[..., Job], rank: int) -> None:
    here = job(2)
    leaving = here.start(Peers.leave, rank)
    here.wait_for(peers._LAST_ROUND, rank)
    here.clock.pass_by(5.0)
    assert leaving() == [None]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_leaves_without_one_that_is_lost(job: Callable[..., Job], lost: int) -> None:
    here = job(3)
    others = {0, 1, 2} - {lost}
    leaving = here.start(Peers.leave, *others)
    here.wait_for(peers._LAST_ROUND, *others)
    here.workers[lost].close()
    assert leaving() == [None] * 2  # the clock stands still: they wait for no limit


def test_a_worker_that_leaves_is_not_taken_for_one_at_a_barrier(job: Callable[..., Job]) -> None:
    here = job(2)
    waiting = here.start(lambda worker: worker.all_gather(b"", timeout=5.0), 0)
    leaving = here.start(Peers.leave, 1)
    here.wait_for(0, 0)
    here.wait_for(peers._LAST_ROUND, 1)
    here.clock.pass_by(5.0)
    (error,) = waiting()
    assert isinstance(error, PeerMissingError) and leaving() == [None]


def test_a_loss_ends_a_wait_elsewhere(job: Callable[..., Job]) -> None:
    here = job(3)
    here.run(lambda worker: worker.all_gather(b""))
    here.workers[2].close()
    wait_until(lambda: all(worker._lost for worker in here.workers[:2]))
    here.clock.pass_by(4.9)
    for worker in here.workers[:2]:
        worker.check()
    here.clock.pass_by(0.2)
    for worker in here.workers[:2]:
        with refused(PeerMissingError, "lost worker 2 (it ended its program, or was killed)", "max-restarts"):
            worker.check()


@pytest.mark.parametrize("place", ["body", "number", "size", "signature", "twice", "back to its sender"])
def test_a_frame_that_the_worker_has_not_sent_is_never_used(job: Callable[..., Job], place: str) -> None:
    """Somebody on the way changes, repeats or returns a frame."""
    near, far = socket.socketpair()
    first = Peers(0, 2, {1: connection(near, KEY, first=True)})
    with socket.socketpair()[0] as unused:
        recorder, read = socket.socketpair()
        sender = peer_at(recorder, KEY, first=False)
        sender.send(0, 0, b"")  # the hello
        hello = read.recv(1000)
        sender.send(2, 0, b"value")
        frame = bytearray(read.recv(1000))
        unused.close()
    if place == "twice":
        frame = bytearray(hello)
    elif place == "back to its sender":
        answer = peer_at(read, KEY, first=True)
        answer.send(0)
        answer.send(2, 0, b"value")
        frame = bytearray(recorder.recv(1000)[-len(frame) :])
    else:
        frame[{"body": 20, "number": 8, "size": 10, "signature": -1}[place]] ^= 1
    far.sendall(hello + frame)
    problem = "its size is impossible" if place == "size" else "not signed by it"
    with refused(AuthenticationError, "Worker 1 was disconnected", problem, "docs/security.md"):
        first.all_gather(b"mine")
    first.close()
    for sock in (far, recorder, read):
        sock.close()


@pytest.mark.parametrize(
    ("kind", "body"),
    [(peers._ALL, b"short"), (peers._ALL, (3).to_bytes(8, "big") + b"one"), (peers._MISSING, b"x")],
)
def test_a_frame_that_cannot_be_read_ends_the_wait(kind: int, body: bytes) -> None:
    near, far = socket.socketpair()
    worker = Peers(1, 2, {0: connection(near, None, first=False)})
    peer_at(far, None, first=True).send(kind, 0, body)
    with refused(AuthenticationError, "Worker 0 was disconnected", "cannot be read"):
        worker.all_gather(b"")
    worker.close()
    far.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_ends_the_wait(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("a mistake in here")

    here = job(2)
    here.run(lambda worker: worker.all_gather(b""))
    monkeypatch.setattr(here.workers[1], "_receive", fail)
    for error in here.run(lambda worker: worker.all_gather(b"")):
        if isinstance(error, Exception):
            assert "this worker's own connections failed: RuntimeError('a mistake in here')" in str(error)
            break
    else:
        raise AssertionError("nobody has noticed")


def test_several_losses_at_once_are_sent_to_the_others() -> None:
    """Telling one worker of a loss may be how the loss of that worker is noticed."""
    pairs = {worker: socket.socketpair() for worker in range(1, 5)}
    first = Peers(0, 5, {worker: connection(near, None, first=True) for worker, (near, _) in pairs.items()})
    for _, far in pairs.values():
        peer_at(far, None, first=False).send(peer_connections.HELLO)
    wait_until(lambda: all(link.open for link in first._links.values()))
    with first._changed:
        for _, far in pairs.values():
            far.close()
        first._lose(1, "a test")
    with refused(PeerMissingError, "worker 1 (a test)", "worker 2", "worker 3", "worker 4"):
        first.all_gather(b"")
    first.close()


def waits_for_an_answer() -> tuple[GivenClock, PeerLink, Callable[[], Any]]:
    """Worker 1, whose time for a round is over, asks the first worker, a bare link, who is missing."""
    near, far = socket.socketpair()
    clock = GivenClock()
    worker = Peers(1, 3, {0: connection(near, None, first=False)}, clock=clock)
    first = peer_at(far, None, first=True)
    found: list[BaseException] = []

    def work() -> None:
        with pytest.raises(PeerMissingError) as caught:
            worker.all_gather(b"", timeout=0.3)
        found.append(caught.value)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until(lambda: worker._round == 1)
    clock.pass_by(0.3)
    wait_until(lambda: peers._MISSING in frames(first))

    def end() -> Any:
        thread.join(SECONDS)
        worker.close()
        first.close()
        return found[0]

    return clock, first, end


def test_who_is_lost_is_named_and_not_the_first_worker_that_does_not_answer() -> None:
    _, first, end = waits_for_an_answer()
    first.send(peer_connections.LOST, 2, b"a test")
    assert "lost worker 2 (a test)" in end().message


def test_the_first_worker_is_named_if_it_does_not_say_who_is_missing() -> None:
    clock, _, end = waits_for_an_answer()
    clock.pass_by(2.0)
    assert "Worker 0 did not reach this point within 0.3 s" in end().message


def test_a_large_value_is_in_memory_once_for_all_workers() -> None:
    value = os.urandom(20_000_000)
    pairs = {worker: socket.socketpair() for worker in range(1, 5)}
    first = Peers(0, 5, {worker: connection(near, KEY, first=True) for worker, (near, _) in pairs.items()})
    tracemalloc.start()
    try:
        for _, far in pairs.values():
            link = peer_at(far, KEY, first=False)
            link.send(peer_connections.HELLO)
            link.send(peers._VALUE)
        assert first.all_gather(value)[0] is value
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
        peers,
        "run_rendezvous",
        lambda topology, timeout, clock: {1: connection(next(ends)[0], None, first=True)},
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
    link = peer_at(near, KEY, first=True)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    link.close()


def frames(link: PeerLink) -> list[int]:
    """The kinds of the frames that have come."""
    return [kind for kind, *_ in link.receive()]


@pytest.mark.parametrize("fate", ["stopped", "busy", "elsewhere"])
def test_a_silent_worker_gets_signs_of_life_and_is_lost_if_it_is_stopped(fate: str) -> None:
    """Its limits are those of `PeerLiveness`, which are tested there."""
    near, far = socket.socketpair()
    clock = GivenClock()
    first = Peers(0, 2, {1: connection(near, None, first=True)}, clock=clock)
    link = peer_at(far, None, first=False)
    machine = "another" if fate == "elsewhere" else peer_link._machine()
    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            if fate == "stopped":
                process.send_signal(signal.SIGSTOP)
                wait_until(lambda: peer_link.runs_here((machine, process.pid)) is False)
            link.send(peer_connections.HELLO, 0, f"{machine} {process.pid}".encode())
            wait_until(lambda: has_greeted(first))
            assert frames(link) == [peer_connections.HELLO]
            for _ in range(7):
                pass_a_second(first, clock)
            assert not first._lost and frames(link) == [peer_connections.ALIVE] * 3
            for _ in range(7):
                pass_a_second(first, clock)
            lost = {1: "it has sent no sign of life for 8 s"} if fate == "stopped" else {}
            assert first._lost.reasons() == lost
        finally:
            first.close()
            link.close()
            process.kill()


def has_greeted(first: Peers) -> bool:
    """Whether the first worker has answered the other one's greeting."""
    with first._changed:  # the answer is sent before it is released
        return first._links[1].open


def pass_a_second(worker: Peers, clock: GivenClock) -> None:
    """Moves the clock by a second, and waits until the worker's thread has seen it, or has no links."""
    with worker._changed:
        clock.pass_by(1.0)
    worker._wakeup.wake()
    wait_until(lambda: not worker._links or worker._liveness._checked == clock.now())
