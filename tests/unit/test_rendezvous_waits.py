"""How long tasks wait for each other, on a given clock: the rendezvous, parameter servers and their chief."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtrain.base.clock import REAL
from dtrain.base.tcp import accept, answers_at
from dtrain.environments.topology import Topology
from dtrain.errors import PeerMismatchError, PeerMissingError, PortInUseError
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.process_group import serving
from dtrain.process_group.control import Control
from dtrain.process_group.logged_wait import LoggedWait
from dtrain.process_group.proof import ProofError, introduce
from dtrain.process_group.rendezvous import hold_port, run_rendezvous
from dtrain.process_group.rendezvous_verdict import handshake_with_first
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import PROTOCOL, SignedFrames
from given_clock import GivenClock
from processes import wait_until
from refusals import refused

SECONDS = 120.0


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """Three free addresses, reserved until the test ends."""
    with reserve_ports(3) as ports:
        yield [f"127.0.0.1:{port}" for port in ports]


def listener_at(address: str) -> socket.socket:
    return socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))


class Joining:
    """A task that takes part in a rendezvous, in a thread, and what it logs and gets."""

    def __init__(
        self,
        addresses: list[str],
        rank: int,
        clock: GivenClock,
        timeout: float = 3600.0,
        secret: bytes = b"",
    ) -> None:
        if rank > 0:  # a pause before the next try to connect would move the clock
            wait_until(lambda: answers_at(addresses[0]))
        self.lines: list[str] = []
        self.clock = clock
        self.found: Any = None
        topology = Topology({"worker": tuple(addresses)}, "worker", rank)

        def join() -> None:
            try:
                self.found = run_rendezvous(
                    topology, timeout=timeout, log=self.lines.append, secret=secret, clock=clock
                )
            except Exception as error:
                self.found = error

        self._thread = threading.Thread(target=join, daemon=True)
        self._thread.start()

    def end(self) -> Any:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "it waits for ever"
        return self.found

    def wait_for_line(self, words: str) -> None:
        """Moves the clock by ten seconds again and again, until the task logs a line with these words."""
        for _ in range(300):
            before = len(self.lines)
            self.clock.pass_by(10.0)
            wait_until(lambda before=before: len(self.lines) > before)
            if words in self.lines[-1]:
                return
        raise AssertionError(f"{words!r} not in {self.lines}")


def test_a_wait_logs_every_ten_seconds_who_is_missing_until_it_is_over() -> None:
    clock, lines = GivenClock(), list[str]()
    wait = LoggedWait(25.0, lines.append, clock)
    logged = []
    for second in range(1, 26):
        clock.pass_by(1.0)
        if wait.log_if_due(["worker 1", "ps 0"]):
            logged.append(second)
        assert wait.deadline.passed() == (second == 25)
    assert logged == [10, 20]
    assert lines == [f"waiting for worker 1, ps 0; giving up in {left} s" for left in (15, 5)]


def test_a_wait_without_a_limit_never_ends() -> None:
    clock, lines = GivenClock(), list[str]()
    wait = LoggedWait(math.inf, lines.append, clock)
    assert not wait.log_if_due(["worker 1"]) and wait.pause() == 10.0
    clock.pass_by(1e9)
    assert wait.log_if_due(["worker 1"]) and not wait.log_if_due(["worker 1"])
    assert not wait.deadline.passed() and lines == ["waiting for worker 1"]


def test_a_wait_logs_nothing_while_nobody_is_missing() -> None:
    clock, lines = GivenClock(), list[str]()
    wait = LoggedWait(math.inf, lines.append, clock)
    clock.pass_by(10.0)
    assert not wait.log_if_due([]) and wait.log_if_due(["worker 1"]) and len(lines) == 1


@pytest.mark.parametrize("limits", [(3600.0, 7200.0), (7200.0, 3600.0)])
def test_all_name_the_missing_task_while_they_wait_and_when_one_gives_up(
    addresses: list[str], limits: tuple[float, float]
) -> None:
    """The one that gives up first is not missing: it was there."""
    clock = GivenClock()
    first, second = (Joining(addresses, rank, clock, limits[rank]) for rank in (0, 1))
    missing = f"waiting for worker 2 ({addresses[2]})"
    first.wait_for_line(missing)
    second.wait_for_line(missing)
    assert clock.now() < 4500.0
    clock.at = 1000.0 + 3600.0
    for each in (first, second):
        error = each.end()
        assert isinstance(error, PeerMissingError)
        assert f"Missing: worker 2 ({addresses[2]})." in str(error) and "DTRAIN_PEER_TIMEOUT" in str(error)


def test_a_missing_first_task_is_named(addresses: list[str]) -> None:
    clock, lines = GivenClock(), list[str]()
    topology = Topology({"worker": tuple(addresses)}, "worker", 1)
    with refused(PeerMissingError, f"Missing: worker 0 ({addresses[0]})."):
        run_rendezvous(topology, timeout=60.0, log=lines.append, secret=b"", clock=clock)
    assert clock.now() == pytest.approx(1060.0, abs=0.3)
    assert len(lines) == 5 and lines[0].startswith(f"waiting for worker 0 ({addresses[0]})")


def test_a_lone_worker_waits_for_nobody(addresses: list[str]) -> None:
    clock = GivenClock()
    assert run_rendezvous(Topology({"worker": (addresses[0],)}, "worker", 0), clock=clock) == {}
    assert clock.now() == 1000.0


def test_a_name_that_nobody_knows() -> None:
    topology = Topology({"worker": ("no-such-host.invalid:2222", "127.0.0.1:2223")}, "worker", 1)
    with refused(PeerMissingError, "no-such-host.invalid:2222"):
        run_rendezvous(topology, timeout=1.0, clock=GivenClock())


class FirstTask:
    """A first task that tells whoever connects that worker 2 is missing. Worker 1 has logged that."""

    def __init__(self, addresses: list[str]) -> None:
        self.frames = SignedFrames(None, connected=False)
        self._server = listener_at(addresses[0])
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()
        self.worker = Joining(addresses, 1, GivenClock())
        self.worker.wait_for_line("waiting for worker 2")
        self.sock = self._socks[-1]

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                if sock.recv(65536):
                    self._socks.append(sock)
                    sock.sendall(self.frames.encode_message("waiting", missing=["worker 2"]))

    def received(self) -> bytes:
        """What comes next; b"" if the worker has closed the connection."""
        return self.sock.recv(65536)

    def close(self) -> None:
        for sock in (*self._socks, self._server):
            sock.close()


@pytest.fixture
def first_task(addresses: list[str]) -> Iterator[FirstTask]:
    with contextlib.closing(FirstTask(addresses)) as found:
        yield found


def test_a_worker_that_has_given_up_does_not_go_on(first_task: FirstTask) -> None:
    """The first worker's "go" crosses the other's "gave up"."""
    first_task.worker.clock.at = 1000.0 + 3600.0
    assert b"gave up" in first_task.received()
    first_task.sock.sendall(first_task.frames.encode_message("go"))
    error = first_task.worker.end()
    assert isinstance(error, PeerMissingError) and "Missing: worker 2" in str(error)


def test_a_worker_that_has_given_up_waits_two_seconds_for_the_first_workers_answer(
    first_task: FirstTask,
) -> None:
    first_task.worker.clock.at = 1000.0 + 3600.0
    assert b"gave up" in first_task.received()
    first_task.worker.clock.pass_by(2.0)
    assert first_task.received() == b""  # it has closed the connection
    assert isinstance(first_task.worker.end(), PeerMissingError)


def test_what_answers_nothing_for_five_seconds_is_no_first_task(addresses: list[str]) -> None:
    with listener_at(addresses[0]) as other:
        worker = Joining(addresses, 1, GivenClock())
        hellos = 0
        while hellos < 3:  # it connects again and again
            sock, _ = other.accept()
            with sock:
                if sock.recv(65536):
                    hellos += 1
                    worker.clock.pass_by(5.0)
                    assert sock.recv(1) == b""
        sock, _ = other.accept()
        worker.clock.pass_by(3600.0)
        assert "something answers that is not a dtrain process" in str(worker.end())
        sock.close()


def test_a_connection_must_say_who_it_is_within_five_seconds(addresses: list[str]) -> None:
    clock = GivenClock()
    first = Joining(addresses[:2], 0, clock)
    silent = connected_to(addresses[0])
    silent.settimeout(0.05)
    while True:
        clock.pass_by(5.0)
        with contextlib.suppress(TimeoutError):
            assert silent.recv(1) == b""
            break
    second = Joining(addresses[:2], 1, clock)
    assert [*first.end()] == [1] and [*second.end()] == [0]
    silent.close()


def connected_to(address: str) -> socket.socket:
    """A connection to an address, as soon as somebody listens there."""
    found: list[socket.socket] = []

    def connect() -> bool:
        with contextlib.suppress(OSError):
            found.append(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))))
        return bool(found)

    wait_until(connect)
    return found[0]


def test_after_a_failure_the_first_task_tells_the_reason_to_those_that_come_within_five_seconds(
    addresses: list[str],
) -> None:
    clock, secret = GivenClock(), b"known to all"
    first = Joining(addresses, 0, clock, secret=secret)
    wrong = Joining([*addresses[:2], "127.0.0.1:9"], 2, GivenClock(), secret=secret)
    assert isinstance(wrong.end(), PeerMismatchError)
    clock.pass_by(4.9)
    late = Joining(addresses, 1, GivenClock(), secret=secret)
    for each in (late, first):
        error = each.end()
        assert isinstance(error, PeerMismatchError) and "it at '127.0.0.1:9'" in str(error)


def test_after_a_failure_the_first_task_does_not_wait_longer_than_five_seconds(addresses: list[str]) -> None:
    clock, secret = GivenClock(), b"known to all"
    first = Joining(addresses, 0, clock, secret=secret)
    wrong = Joining([*addresses[:2], "127.0.0.1:9"], 2, GivenClock(), secret=secret)
    assert isinstance(wrong.end(), PeerMismatchError)
    while first.found is None:
        clock.pass_by(5.0)
        first._thread.join(0.05)
    assert isinstance(first.found, PeerMismatchError)


def test_without_a_secret_a_process_that_does_not_fit_is_refused_and_named(addresses: list[str]) -> None:
    clock = GivenClock()
    first = Joining(addresses, 0, clock)
    wrong = Joining([*addresses[:2], "127.0.0.1:9"], 2, GivenClock()).end()
    assert isinstance(wrong, PeerMismatchError) and "See the log of that task" in str(wrong)
    assert addresses[2] not in str(wrong)  # a stranger is not told the cluster
    wait_until(lambda: bool(first.lines))
    assert f"a process was refused: worker 0 (process {os.getpid()}" in first.lines[0]
    second = Joining(addresses, 1, clock)
    for each in (first, second):
        each.wait_for_line(f"waiting for worker 2 ({addresses[2]})")
    clock.at = 1000.0 + 3600.0
    for each in (first, second):
        error = str(each.end())
        assert "These were refused: worker 0" in error
        assert "it at '127.0.0.1:9'" in error and "Missing: worker 2" in error


def test_the_error_of_a_process_without_the_secret(addresses: list[str]) -> None:
    first = Joining(addresses, 0, GivenClock(), secret=b"known to all")
    without = Joining(addresses, 1, GivenClock(), timeout=5.0).end()
    assert isinstance(without, PeerMissingError) and "DTRAIN_SECRET_FILE" in str(without)
    another = Joining(addresses, 2, GivenClock(), timeout=5.0, secret=b"another").end()
    assert isinstance(another, PeerMissingError) and "with this job's secret" in str(another)
    first.clock.pass_by(3600.0)
    error = first.end()
    assert isinstance(error, PeerMissingError) and "does not know the secret" in str(error)


@pytest.mark.parametrize("secret", [b"", b"known to all"])
def test_a_stranger_is_told_nothing_about_the_job(addresses: list[str], secret: bytes) -> None:
    """Whatever it sends, no address, name, count or version comes back; with a secret only random bytes."""
    first = Joining(addresses, 0, GivenClock(), secret=secret)
    message = {"job": "worker", "index": 1, "process": "p", "cluster": {}, "problem": ""}
    told = b""
    for changed in ({}, {"protocol": PROTOCOL}, {"protocol": PROTOCOL, "index": 9}, {"index": 0}):
        hello = SignedFrames(None, connected=True).encode_message("hello", **{**message, **changed})
        for sent in (hello, os.urandom(32) + b"\x08worker 1" + os.urandom(32), b"GET / HTTP/1.1\r\n\r\n" * 9):
            with connected_to(addresses[0]) as stranger:
                stranger.sendall(sent)
                with contextlib.suppress(OSError):  # the other side may have ended the connection by now
                    stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while more := stranger.recv(4096):
                        told += more
    if secret:
        assert len(told) == 32 * 12  # a challenge on each connection
        assert b"dtrain" not in told
    else:
        assert b"refused" not in told
    for word in (*addresses, socket.gethostname(), str(os.getpid()), "worker"):
        assert word.encode() not in told
    second, third = (Joining(addresses, rank, GivenClock(), secret=secret) for rank in (1, 2))
    assert sorted(first.end()) == [1, 2] and [*second.end()] == [*third.end()] == [0]


def test_a_task_may_give_up_as_soon_as_it_has_come(addresses: list[str]) -> None:
    """Both messages come at once."""
    first = Joining(addresses, 0, GivenClock())
    frames = SignedFrames(None, connected=True)
    hello = {"protocol": PROTOCOL, "job": "worker", "index": 1, "process": "p", "problem": ""}
    with connected_to(addresses[0]) as sock:
        sock.sendall(
            frames.encode_message("hello", cluster={"worker": addresses}, **hello)
            + frames.encode_message("gave up")
        )
        error = first.end()
    assert isinstance(error, PeerMissingError) and f"Missing: worker 2 ({addresses[2]})." in str(error)


@pytest.mark.parametrize(("kind", "index"), [("hello", 2), ("hello", None), ("gave up", 1)])
def test_a_task_that_has_proved_to_be_another_one_is_not_admitted(
    addresses: list[str], kind: str, index: int | None
) -> None:
    first = Joining(addresses, 0, GivenClock(), secret=b"known to all")
    with connected_to(addresses[0]) as sock:
        task = Topology({"worker": tuple(addresses)}, "worker", 1).task
        handshake = handshake_with_first(Secret(b"known to all", "a test"), task, addresses[0])
        introduce(sock, handshake, REAL.deadline(SECONDS))
        sock.settimeout(SECONDS)
        frames = SignedFrames(handshake.key, connected=True)
        sock.sendall(frames.encode_message(kind, job="worker", index=index, process="p"))
        assert sock.recv(1) == b""
    second, third = (Joining(addresses, rank, GivenClock(), secret=b"known to all") for rank in (1, 2))
    assert sorted(first.end()) == [1, 2] and [*second.end()] == [*third.end()] == [0]


def test_a_proof_for_another_job_of_the_same_user_is_refused(addresses: list[str]) -> None:
    """Both jobs share the user's secret, and a stranger carries all bytes from one to the other."""
    first = Joining(addresses, 0, GivenClock(), secret=b"of the user")
    wait_until(lambda: answers_at(addresses[0]))
    other = Topology({"worker": ("127.0.0.1:1", addresses[1])}, "worker", 1)
    with connected_to(addresses[0]) as relayed, pytest.raises(ProofError):
        secret = Secret(b"of the user", "a test")
        introduce(relayed, handshake_with_first(secret, other.task, "127.0.0.1:1"), REAL.deadline(SECONDS))
    second, third = (Joining(addresses, rank, GivenClock(), secret=b"of the user") for rank in (1, 2))
    assert sorted(first.end()) == [1, 2] and [*second.end()] == [*third.end()] == [0]


class ClosingClock(GivenClock):
    """A clock whose first pause closes a listener."""

    def __init__(self, other: socket.socket) -> None:
        super().__init__()
        self._other = other

    def sleep(self, seconds: float) -> None:
        self._other.close()
        super().sleep(seconds)


def test_a_port_that_gets_free_in_time_is_no_error() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{other.getsockname()[1]}"
    assert run_rendezvous(Topology({"worker": (address,)}, "worker", 0), clock=ClosingClock(other)) == {}


def test_a_port_may_be_held_for_two_seconds_by_a_process_that_ends() -> None:
    clock = GivenClock()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused(PortInUseError, f"127.0.0.1:{port}"):
            hold_port(f"127.0.0.1:{port}", port, clock)
    assert clock.now() == pytest.approx(1002.0, abs=0.11)


def test_a_task_whose_port_is_in_use_tries_for_three_seconds_to_tell_the_first_one(
    addresses: list[str],
) -> None:
    clock = GivenClock()
    with listener_at(addresses[1]), refused(PortInUseError, addresses[1]):
        run_rendezvous(Topology({"worker": tuple(addresses)}, "worker", 1), secret=b"", clock=clock)
    assert clock.now() == pytest.approx(1000.0 + 2.0 + 3.0, abs=0.4)


class WithoutDescriptors:
    """A listener of a process that has no free descriptor."""

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_a_free_descriptor_the_process_pauses_and_logs_every_ten_seconds() -> None:
    clock, lines = GivenClock(at=1e9), list[str]()  # later than what other tests have logged
    for _ in range(200):
        assert accept(WithoutDescriptors(), lines.append, clock) is None  # type: ignore[arg-type]
    assert clock.now() == pytest.approx(1e9 + 20.0)
    assert len(lines) == 2 and "Too many open files" in lines[0]


# --- parameter servers and their chief


def of_servers(addresses: list[str], job: str = "chief") -> Topology:
    jobs = {"chief": (addresses[0],), "worker": (addresses[1],), "ps": (addresses[2],)}
    return Topology(jobs, job, 0)


def test_a_chief_waits_for_its_servers_and_names_those_that_are_missing(addresses: list[str]) -> None:
    clock, lines = GivenClock(), list[str]()
    with listener_at(addresses[2]), refused(PeerMissingError, f"Missing: worker 0 ({addresses[1]})."):
        serving.wait_for_servers(
            of_servers(addresses), 60.0, log=lines.append, is_own_port=lambda port: True, clock=clock
        )
    assert clock.now() == pytest.approx(1060.0, abs=0.3)
    assert len(lines) == 5
    assert lines[0].startswith(f"waiting for worker 0 ({addresses[1]}); giving up in ")


class AppearingClock(GivenClock):
    """A clock on which something happens after so many seconds."""

    def __init__(self, seconds: float, happen: Callable[[], object]) -> None:
        super().__init__()
        self._when, self._happen = self.at + seconds, happen
        self.happened: Any = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.at >= self._when and self.happened is None:
            self.happened = self._happen()


def test_a_server_that_comes_late_is_waited_for(addresses: list[str]) -> None:
    clock = AppearingClock(50.0, lambda: listener_at(addresses[1]))
    with listener_at(addresses[2]):
        serving.wait_for_servers(of_servers(addresses), 60.0, log=print, clock=clock)
    clock.happened.close()
    assert 1050.0 <= clock.now() < 1051.0


@pytest.fixture
def watch(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[GivenClock, Control, serving._ChiefWatch]:
    """A server's watch for its chief, which gives up after 300 s, or 60 s after the chief was there."""
    monkeypatch.setenv("DTRAIN_PEER_TIMEOUT", "300")
    monkeypatch.setenv("DTRAIN_CHIEF_TIMEOUT", "60")
    clock = GivenClock()
    control = Control(of_servers(addresses, "ps"), clock)
    return clock, control, serving._ChiefWatch(control, clock)


def passes(watch: serving._ChiefWatch, clock: GivenClock, seconds: float) -> None:
    for _ in range(round(seconds / 2)):
        clock.pass_by(2.0)
        watch.check()


def test_a_server_waits_for_its_chief(
    watch: tuple[GivenClock, Control, serving._ChiefWatch],
    addresses: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, _, found = watch
    passes(found, clock, 300.0)
    with refused(PeerMissingError, f"The chief ({addresses[0]}) did not appear within 302 s."):
        passes(found, clock, 2.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 30
    assert lines[0] == f"dtrain: waiting for chief 0 ({addresses[0]}); giving up in 290 s"


@pytest.mark.parametrize("sign", ["it listens", "it has asked"])
def test_a_server_gives_up_a_chief_that_is_gone_sooner_and_serves_one_that_comes_back(
    watch: tuple[GivenClock, Control, serving._ChiefWatch], addresses: list[str], sign: str
) -> None:
    clock, control, found = watch
    passes(found, clock, 298.0)
    for _ in range(5):
        if sign == "it listens":
            with listener_at(addresses[0]):
                passes(found, clock, 2.0)
        else:
            clock.pass_by(2.0)
            control(json.dumps({"ask": "status"}))
            found.check()
        passes(found, clock, 60.0)
    with refused(PeerMissingError, f"The chief ({addresses[0]}) is lost", "62 s"):
        passes(found, clock, 2.0)


def test_a_server_waits_for_the_end_of_its_chief_so_long_and_no_longer(
    watch: tuple[GivenClock, Control, serving._ChiefWatch], addresses: list[str]
) -> None:
    clock, _, found = watch
    with listener_at(addresses[0]):
        found.wait_for_end(8.0)
    assert clock.now() == pytest.approx(1008.0, abs=0.3)
    found.wait_for_end(8.0)
    assert clock.now() == pytest.approx(1008.0, abs=0.3)
