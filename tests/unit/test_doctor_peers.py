"""The processes of `dtrain doctor` probe each other, and a peer that was not measured is never "ok"."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.harness import free_ports
from dtrain.base.clock import REAL
from dtrain.base.tcp import split_address
from dtrain.diagnosis import checks, peer_checks
from dtrain.diagnosis.check import CheckContext
from dtrain.diagnosis.peer_probe import Channel, PeerProbe, PeerResult, handshake_of_peer
from dtrain.environments.topology import Task, Topology
from dtrain.process_group.proof import introduce
from dtrain.process_group.secret import Secret, job_secret
from given_clock import GivenClock

SECRET = Secret(b"0123456789abcdef", "a test")


def topologies(tasks: int = 2) -> list[Topology]:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(tasks))
    return [Topology({"worker": addresses}, "worker", index) for index in range(tasks)]


@contextlib.contextmanager
def served(task: Topology, serve: Any) -> Iterator[None]:
    """A task whose host answers, and whose exchange `serve(connection)` carries out."""

    def accept() -> None:
        listener.accept()[0].close()  # whether the host answers
        connection = listener.accept()[0]
        with connection, contextlib.suppress(OSError):
            serve(connection)

    with socket.create_server(("127.0.0.1", split_address(task.address)[1])) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield
        thread.join()


@pytest.fixture
def environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Topology, Topology, Secret]]:
    """The two tasks of a job and its secret; the environment is that of the first one."""
    first, second = topologies()
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(16))
    monkeypatch.setenv("DTRAIN_SECRET_FILE", str(secret))
    monkeypatch.setenv("TF_CONFIG", first.to_tf_config())
    monkeypatch.setitem(checks.CHECKS, "TF_CONFIG", peer_checks.check_peers)
    for name in [name for name in checks.CHECKS if name != "TF_CONFIG"]:
        monkeypatch.delitem(checks.CHECKS, name)
    found = job_secret(first)
    assert found is not None
    yield first, second, found


@pytest.mark.parametrize("sent", [math.nan, math.inf, None])
def test_a_peer_without_a_sound_clock_has_not_met(sent: Any) -> None:
    first, second = topologies()

    def serve(connection: socket.socket) -> None:
        handshake = handshake_of_peer(SECRET)
        introduce(connection, handshake, REAL.deadline(60.0))
        channel = Channel(connection, handshake, REAL.deadline(60.0))
        assert channel.receive()["dtrain"] == "facts"
        channel.send("facts", task="worker 1")
        assert channel.receive() == {"dtrain": "ping"}
        channel.send("time", time=sent)

    with served(second, serve), PeerProbe(first, SECRET, {}) as probe:
        found = probe.run(0.0)[second.task]
    assert found.problem and found.facts == {"dtrain": "facts", "task": "worker 1"}


def test_a_peer_that_sends_byte_by_byte_is_given_up() -> None:
    clock = GivenClock()

    def trickle(connection: socket.socket) -> None:
        connection.recv(32)  # its challenge: from here on it waits for an answer
        for _ in range(15):
            connection.sendall(b"d")
            clock.pass_by(1.0)
        while connection.recv(4096):  # until the probe ends the connection
            pass

    first, second = topologies()
    with served(second, trickle), PeerProbe(first, SECRET, {}, clock=clock) as probe:
        assert "did not prove in time" in probe.run(0.0)[second.task].problem


def test_peers_are_measured_one_after_another() -> None:
    measured: list[PeerResult] = []
    at_once: list[int] = []

    class Counting(PeerProbe):
        def _measure(self, channel: Channel, peer: PeerResult) -> None:
            measured.append(peer)
            super()._measure(channel, peer)
            at_once.append(len(measured))
            measured.remove(peer)

    first, *others = topologies(3)
    with contextlib.ExitStack() as stack:
        for each in others:
            stack.enter_context(PeerProbe(each, SECRET, {}))
        # The others never measure this task, so it waits for them, on its clock.
        found = stack.enter_context(Counting(first, SECRET, {}, clock=GivenClock())).run(0.0)
    assert [peer.problem for peer in found.values()] == ["", ""]
    assert at_once == [1, 1]


def test_a_peer_that_was_not_measured_has_a_problem() -> None:
    assert PeerResult().problem
    assert CheckContext(peers={topologies()[1].task: PeerResult()}).reached() == {}


def test_versions_of_another_form_differ() -> None:
    peer = PeerResult(problem="", facts={"versions": ["1.0"]})
    context = CheckContext(peers={topologies()[1].task: peer})
    assert [each.status for each in peer_checks.check_same_versions(context)] == ["fail"]


def test_an_error_of_the_meeting_is_not_one_of_the_port(environment: Any) -> None:
    class Failing(GivenClock):
        def now(self) -> float:
            raise OSError(22, "Invalid argument")

    with pytest.raises(OSError, match="Invalid argument"):
        list(checks.run_checks(None, 0.0, clock=Failing()))


def test_a_file_stays_for_peers_that_met_late(
    environment: tuple[Topology, Topology, Secret], tmp_path: Path
) -> None:
    _, second, secret = environment
    slept: list[tuple[float, bool]] = []

    class Watching(GivenClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            slept.append((seconds, any(tmp_path.glob(".dtrain-doctor-*"))))

    clock = Watching()
    with PeerProbe(second, secret, {}):
        findings = checks.run_checks(tmp_path, 0.0, clock=clock)
        assert next(findings)[1].status == "ok"
        # The other task never measures this one, which waits for it: the meeting alone took that long.
        assert clock.now() - 1000.0 > peer_checks.FRESH
        slept.clear()
        assert list(findings) == []
    assert slept == [(peer_checks.FRESH + 1.0, True)]
    assert not list(tmp_path.glob(".dtrain-doctor-*"))


def test_a_file_of_a_peer_may_appear_late(tmp_path: Path) -> None:
    token = f".dtrain-doctor-{secrets.token_hex(16)}"
    peers = {Task("worker", 1): PeerResult(problem="", facts={"token": token})}

    class Watching(GivenClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now() >= 1000.0 + shown:
                (tmp_path / token).touch()

    for shown, status in ((peer_checks.FRESH - 0.5, "ok"), (math.inf, "fail")):
        (tmp_path / token).unlink(missing_ok=True)
        clock = Watching()
        context = CheckContext(peers=peers, checkpoint_dir=tmp_path, clock=clock)
        found = [each.status for each in peer_checks.check_checkpoint_directory(context)]
        assert found == ["ok", status]
        assert clock.now() - 1000.0 == pytest.approx(min(shown, peer_checks.FRESH), abs=0.11)


def test_an_interrupt_removes_the_file_at_once(
    environment: tuple[Topology, Topology, Secret], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupted: list[float] = []
    clock = GivenClock()

    def interrupt(context: CheckContext) -> Iterator[Any]:
        assert context.reached() and list(tmp_path.glob(".dtrain-doctor-*"))
        interrupted.append(clock.now())
        raise KeyboardInterrupt

    monkeypatch.setitem(checks.CHECKS, "TF_CONFIG", interrupt)
    with PeerProbe(environment[1], environment[2], {}), pytest.raises(KeyboardInterrupt):
        list(checks.run_checks(tmp_path, 0.0, clock=clock))
    assert interrupted == [clock.now()]
    assert not list(tmp_path.glob(".dtrain-doctor-*"))
