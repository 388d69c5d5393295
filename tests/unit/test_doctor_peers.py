"""The processes of `dtrain doctor` probe each other, and a peer that was not measured is never "ok"."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.harness import free_ports
from dtrain.cluster.secret import Secret
from dtrain.diagnosis import checks, peer_checks, peer_probe
from dtrain.diagnosis.check import CheckContext
from dtrain.diagnosis.peer_probe import PeerProbe, PeerResult
from dtrain.topology import Topology, split_address

SECRET = Secret(b"0123456789abcdef", "a test")


def topologies(tasks: int = 2) -> list[Topology]:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(tasks))
    return [Topology({"worker": addresses}, "worker", index) for index in range(tasks)]


def probed(first: Topology, second: Topology) -> PeerResult:
    """What the first task finds out about the second one, which only serves."""
    with PeerProbe(first, SECRET, {}) as one, PeerProbe(second, SECRET, {}):
        return one.run(0.0)[second.task]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Topology]:
    """The first of two tasks, described by the environment as a job does it."""
    first, _ = topologies()
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(16))
    monkeypatch.setenv("DTRAIN_SECRET_FILE", str(secret))
    monkeypatch.setenv("TF_CONFIG", first.to_tf_config())
    monkeypatch.setattr(checks, "CHECKS", {"peers": peer_checks.check_peers})
    yield first


@pytest.mark.parametrize("sent", [math.nan, math.inf, None])
def test_a_peer_without_a_sound_clock_has_not_met(sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: sent, monotonic=time.monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(peer_probe, "time", clock)
    assert probed(*topologies()).problem


def test_a_peer_that_sends_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "_EXCHANGE_SECONDS", 0.5)
    first, second = topologies()

    def trickle() -> None:
        for _ in range(2):  # whether the host answers, then the exchange
            connection = listener.accept()[0]
            with connection, contextlib.suppress(OSError):
                for _ in range(100):  # 5 seconds, unless the connection ends
                    connection.sendall(b"d")
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", split_address(second.address)[1])) as listener:
        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        with PeerProbe(first, SECRET, {}) as one:
            begun = time.monotonic()
            assert "more than 0.5 s" in one.run(0.0)[second.task].problem
            assert time.monotonic() - begun < 4.0
        thread.join()


def test_peers_are_measured_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[PeerResult] = []
    at_once: list[int] = []

    def measure(self: PeerProbe, channel: Any, peer: PeerResult) -> None:
        measured.append(peer)
        time.sleep(0.1)
        at_once.append(len(measured))
        measured.remove(peer)

    monkeypatch.setattr(peer_probe, "_ANSWER", 1.0)
    monkeypatch.setattr(PeerProbe, "_measure", measure)
    first, *others = topologies(3)
    with contextlib.ExitStack() as stack:
        for each in others:
            stack.enter_context(PeerProbe(each, SECRET, {}))
        stack.enter_context(PeerProbe(first, SECRET, {})).run(0.0)
    assert at_once == [1, 1]


def test_a_peer_that_was_not_measured_has_a_problem() -> None:
    assert PeerResult().problem
    assert CheckContext(peers={topologies()[1].task: PeerResult()}).reached() == {}


def test_versions_of_another_form_differ() -> None:
    peer = PeerResult(problem="", facts={"versions": ["1.0"]})
    context = CheckContext(peers={topologies()[1].task: peer})
    assert [each.status for each in peer_checks.check_same_versions(context)] == ["fail"]


def test_an_error_of_the_meeting_is_not_one_of_the_port(
    environment: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: PeerProbe, seconds: float) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(PeerProbe, "run", run)
    with pytest.raises(OSError, match="Invalid argument"):
        list(checks.run_checks(None, 0.0))


def test_a_file_stays_for_peers_that_met_late(
    environment: Topology, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(self: PeerProbe, seconds: float) -> dict[Any, PeerResult]:
        time.sleep(0.3)  # longer than FRESH
        return {environment.tasks()[1]: PeerResult(problem="", answers=True, facts={"task": "worker 1"})}

    monkeypatch.setattr(PeerProbe, "run", run)
    monkeypatch.setattr(peer_checks, "FRESH", 0.2)
    monkeypatch.setattr(checks, "_MEASURING", 0.1)
    findings = checks.run_checks(tmp_path, 0.0)
    assert next(findings)[1].status == "ok"
    looked = time.monotonic()
    assert list(tmp_path.glob(".dtrain-doctor-*"))
    assert list(findings) == []
    assert time.monotonic() - looked >= 0.2
    assert not list(tmp_path.glob(".dtrain-doctor-*"))


def test_an_interrupt_removes_the_file_at_once(
    environment: Topology, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(context: CheckContext) -> Iterator[Any]:
        raise KeyboardInterrupt

    peer = {environment.tasks()[1]: PeerResult(problem="", answers=True)}
    monkeypatch.setattr(PeerProbe, "run", lambda self, seconds: peer)
    monkeypatch.setattr(checks, "CHECKS", {"interrupted": interrupted})
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(checks.run_checks(tmp_path, 0.0))
    assert time.monotonic() - begun < peer_checks.FRESH
    assert not list(tmp_path.glob(".dtrain-doctor-*"))
