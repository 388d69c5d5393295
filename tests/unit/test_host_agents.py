"""Agents and their coordinator, without a network: what a lost agent, a refusal and the end of a job mean."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, PeerMismatchError, PeerMissingError
from dtrain.launch.hosts import pipe_connection as connection_module
from dtrain.launch.hosts.agent import Agent, Inbox, hello
from dtrain.launch.hosts.agent_messages import (
    End,
    Exited,
    Hello,
    HostMessage,
    Invite,
    Refused,
    Signalled,
    Started,
    Welcome,
    encode,
)
from dtrain.launch.hosts.control_plane import LEASE, LOST, ControlClient, ControlServer
from dtrain.launch.hosts.nodes_launcher import NodesLauncher, _CoordinatorWatch, join_nodes, nodes_secret
from dtrain.launch.hosts.pipe_connection import PipeConnection
from dtrain.launch.hosts.remote_agent import RemoteAgent
from dtrain.launch.hosts.ssh_launcher import SSHLauncher
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.spec import JobSpec, Nodes, SSHHosts
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.process_group.secret import write_secret
from dtrain.task.task_messages import RemoveNote
from given_clock import GivenClock
from in_threads import start_in_threads
from processes import wait_until


class Connection:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[HostMessage] = []

    def send(self, message: HostMessage) -> None:
        self.sent.append(message)


def an_agent() -> tuple[Agent, Connection, Inbox]:
    connection, inbox = Connection(), Inbox()
    return Agent(connection.send, inbox, Welcome("s" * 40, sys.executable)), connection, inbox


def a_node(session: Session, address: str = "") -> tuple[RemoteAgent, Connection]:
    connection = Connection()
    return RemoteAgent(connection.send, hello(1, "b", 2, address, ""), session), connection


def test_a_task_that_is_started_on_a_lost_agent_has_ended() -> None:
    session = Session()
    agent, _ = a_node(session)
    agent.lose()
    task = agent.start(TaskCommand(Task("worker", 1), ["python"], {}), {})
    assert session.events.get_nowait() is task
    assert task.exit_code == -signal.SIGKILL
    assert agent.answer(task.id) is None


def test_a_task_has_ended_as_long_ago_as_its_agent_says() -> None:
    clock = GivenClock(1000.0)
    session = Session(clock=clock)
    agent, _ = a_node(session)
    task = agent.start(TaskCommand(Task("worker", 1), ["python"], {}), {})
    agent.receive(Exited(task.id, 0, 2.5))
    assert session.events.get_nowait() is task and task.ended_at == 997.5


@pytest.mark.parametrize("status", [0, 1])
def test_an_agent_deletes_what_its_own_tasks_have_marked(tmp_path: Path, status: int) -> None:
    agent, connection, inbox = an_agent()
    folders = [tmp_path / name / "0" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        agent._session.events.put(RemoveNote(str(folder)))
    looks = iter([False, False])

    def end() -> bool:
        if next(looks, True):
            inbox.put(End(status))
        return False

    assert agent.run(end) == End(status)
    assert [folder.parent.exists() for folder in folders] == [status != 0] * 2
    assert not connection.sent


def test_a_second_signal_ends_an_agent_that_nobody_answers() -> None:
    agent, connection, _ = an_agent()
    for _ in range(2):
        agent._session.events.put(signal.SIGTERM)
    assert agent.run(lambda: False) is None
    assert agent.signals == [signal.SIGTERM] * 2
    assert connection.sent == [Signalled(signal.SIGTERM)] * 2


# It takes SIGUSR2, and goes on.
TAKES = """
import signal
signal.signal(signal.SIGUSR2, lambda signum, frame: None)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which signals wait")
def test_an_agent_tells_when_a_process_of_its_task_has_taken_a_signal() -> None:
    shown, inbox = io.StringIO(), Inbox()
    there = RemoteAgent(inbox.put, hello(1, "b", 2, "", ""), Session(stdout=shown))
    agent = Agent(there.receive, inbox, Welcome("s" * 40, sys.executable))  # type: ignore[arg-type]
    run = start_in_threads({0: lambda: agent.run(lambda: False)})
    task = there.start(TaskCommand(Task("worker", 0), [sys.executable, "-c", TAKES], {}), {})
    started = there.answer(task.id)
    assert isinstance(started, Started)
    wait_until(lambda: "ready" in shown.getvalue())
    # An answer that does not come in time is a no, so each yes is waited for.
    wait_until(lambda: task.signal_member(started.pid, signal.SIGSTOP) and task.stopped())
    wait_until(lambda: task.has_taken(started.pid, signal.SIGUSR2))
    wait_until(lambda: task.signal_member(started.pid, signal.SIGUSR2))
    assert not task.has_taken(started.pid, signal.SIGUSR2)
    wait_until(lambda: task.signal_member(started.pid, signal.SIGCONT))
    wait_until(lambda: task.has_taken(started.pid, signal.SIGUSR2))
    inbox.put(End(0))
    assert run() == {0: End(0)}


def a_coordinator(nodes: Nodes) -> NodesLauncher:
    command = [sys.executable, "train.py", "--token=ours"]
    return NodesLauncher(Session(), JobSpec(command=command, workers=4, launcher="nodes", nodes=nodes))


@pytest.fixture
def coordinator() -> NodesLauncher:
    return a_coordinator(Nodes(rendezvous="localhost:4000", rank=0, fewest=2, most=2, per_node=2))


@pytest.mark.parametrize(
    ("node", "slots", "command", "part"),
    [
        (-1, 2, ["train.py", "--token=ours"], "nodes are numbered from 0"),
        (1, 3, ["train.py", "--token=ours"], "starts 3 workers, but node 0 starts 2"),
        (1, 2, ["train.py", "--token=theirs"], "word 2 differs"),
        (1, 2, ["train.py"], "word 2 differs"),
        (1, 2, ["train.py", "--token=ours", "more"], "word 3 differs"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(
    coordinator: NodesLauncher, node: int, slots: int, command: list[str], part: str
) -> None:
    refused = coordinator._problem(hello(node, "b", slots, "10.0.0.2", "10.0.0.1", command))
    assert isinstance(refused, Refused) and part in refused.reason
    assert "token" not in refused.reason


def test_a_node_that_fits_is_not_refused(coordinator: NodesLauncher) -> None:
    words = ["train.py", "--token=ours"]
    assert coordinator._problem(hello(1, "b", 2, "10.0.0.2", "10.0.0.1", words)) is None


class Server:
    """The part of `ControlServer` that a launcher uses; keeps what was sent to each node."""

    def __init__(self) -> None:
        self.unauthenticated = 0
        self.sent: dict[bytes, list[HostMessage]] = {}

    def send(self, peer: bytes, message: HostMessage) -> None:
        self.sent.setdefault(peer, []).append(message)


@pytest.fixture
def elastic() -> Iterator[tuple[NodesLauncher, Server]]:
    """The coordinator of 2 or 3 nodes with 2 workers each; node 0 is there."""
    nodes = Nodes(rendezvous="localhost:4000", rank=0, fewest=2, most=3, per_node=2)
    spec = JobSpec(command=["python"], workers=6, min_workers=4, launcher="nodes", nodes=nodes)
    launcher, server = NodesLauncher(Session(clock=GivenClock()), spec), Server()
    launcher._server = server  # type: ignore[assignment]
    with launcher.session.opened():
        launcher._register(print, hello(0, "a", 2, "", ""))
        yield launcher, server


def join(launcher: NodesLauncher, node: int, peer: bytes = b"") -> None:
    launcher._on_message(peer or b"%d" % node, hello(node, f"host{node}", 2, "", ""))


def placed(launcher: NodesLauncher) -> list[int]:
    return [agent.hello.node for agent in launcher._place([Task("worker", index) for index in range(6)])]


def test_workers_that_a_lost_node_had_go_to_a_spare_or_are_left_out(
    elastic: tuple[NodesLauncher, Server],
) -> None:
    launcher, _ = elastic
    for node in (1, 2, 3):
        join(launcher, node)
    assert placed(launcher) == [0, 0, 1, 1, 2, 2] and launcher.slots() == 8
    launcher._on_lost(b"1")
    assert placed(launcher) == [0, 0, 2, 2, 3, 3]
    launcher._on_lost(b"2")
    assert placed(launcher) == [0, 0, 3, 3] and launcher.slots() == 4
    launcher._on_lost(b"3")
    with pytest.raises(PeerMissingError, match=r"needs 4 workers, .* room for 2"):
        placed(launcher)


def test_a_job_starts_with_all_nodes_or_with_the_fewest_when_the_time_is_over(
    elastic: tuple[NodesLauncher, Server],
) -> None:
    launcher, _ = elastic
    assert "1 of at least 2 nodes" in str(launcher._missing(55.0))
    join(launcher, 2)
    assert launcher._missing(54.0) == "" and launcher._missing(55.0) is None
    join(launcher, 1)
    assert launcher._missing(0.0) is None


class RunningClock(GivenClock):
    """A clock on which 30 s pass each time that somebody reads it."""

    def now(self) -> float:
        self.pass_by(30.0)
        return self.at


def test_a_coordinator_does_not_wait_longer_than_the_time_to_join() -> None:
    nodes = Nodes(rendezvous="localhost:4000", rank=0, fewest=2, most=2, per_node=2)
    spec = JobSpec(command=["python"], workers=4, launcher="nodes", nodes=nodes)
    launcher = NodesLauncher(Session(clock=RunningClock()), spec)
    with pytest.raises(PeerMissingError, match=r"0 of 2 nodes have joined at localhost:4000 in 60 s"):
        launcher._wait_for_agents()


def test_a_node_does_not_wait_longer_than_the_time_to_join() -> None:
    with reserve_ports(1) as (port,):
        pass
    nodes = Nodes(rendezvous=f"127.0.0.1:{port}", rank=1, fewest=2, most=2, per_node=2)
    with pytest.raises(PeerMissingError, match=r"Node 1 has waited 55 s for the coordinator"):
        join_nodes(nodes, [sys.executable, "train.py"], RunningClock())


@contextlib.contextmanager
def watched(port: int) -> Iterator[tuple[_CoordinatorWatch, GivenClock]]:
    """A node's watch of a coordinator at this port, and its clock."""
    clock = GivenClock()
    nodes = Nodes(rendezvous="127.0.0.1:1", rank=1, fewest=2, most=2, per_node=2)
    client = ControlClient("127.0.0.1", port, nodes_secret(nodes), print, clock)
    client.start()
    try:
        yield _CoordinatorWatch("127.0.0.1", port, client, clock), clock
    finally:
        client.close()


def test_a_coordinator_whose_port_refuses_connections_for_three_seconds_has_ended() -> None:
    with reserve_ports(1) as (port,):
        pass
    with watched(port) as (watch, clock):
        assert not watch.cut_off()
        clock.pass_by(2.9)
        assert not watch.cut_off()
        with socket.create_server(("127.0.0.1", port)):  # it answers again, so the time begins anew
            clock.pass_by(0.5)
            assert not watch.cut_off()
        for _ in range(6):
            clock.pass_by(0.5)
            assert not watch.cut_off()
        clock.pass_by(0.5)
        assert watch.cut_off() and watch.gone


def test_a_node_is_cut_off_when_its_lease_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, watched(silent.getsockname()[1]) as (watch, clock):
        clock.pass_by(LEASE - 1)
        assert not watch.cut_off()
        clock.pass_by(1.0)
        assert watch.cut_off() and not watch.gone


def test_a_node_without_tasks_waits_for_a_coordinator_that_is_stopped() -> None:
    """It has ended its tasks, whose job may have ended well; nothing of it can be started elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as silent, watched(silent.getsockname()[1]) as (watch, clock):
        clock.pass_by(2 * LEASE)
        assert not watch.cut_off(busy=False) and watch.cut_off(busy=True)
        clock.pass_by(300.0)
        assert watch.cut_off(busy=False)


def test_a_node_whose_rank_is_taken_waits_until_the_other_is_gone(
    elastic: tuple[NodesLauncher, Server],
) -> None:
    launcher, server = elastic
    join(launcher, 1)
    join(launcher, 1, b"again")
    assert b"again" not in server.sent
    launcher._on_lost(b"1")
    assert isinstance(server.sent[b"again"][0], Welcome) and launcher.slots() == 4


def test_a_node_whose_rank_stays_taken_is_refused(elastic: tuple[NodesLauncher, Server]) -> None:
    launcher, server = elastic
    join(launcher, 1)
    join(launcher, 1, b"other")
    clock = launcher.session.clock
    assert isinstance(clock, GivenClock)
    clock.pass_by(LOST)
    launcher._refuse_late()
    assert b"other" not in server.sent
    clock.pass_by(1.0)
    launcher._refuse_late()
    (refused,) = server.sent[b"other"]
    assert isinstance(refused, Refused) and "Node 1 has joined already" in refused.reason
    assert not launcher._waiting


@pytest.mark.parametrize(("node", "refused"), [(0, False), (1, True)])
def test_a_node_without_an_address_is_refused_where_hosts_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: int, refused: bool
) -> None:
    path = tmp_path / "secret"
    write_secret(path)
    monkeypatch.setenv("DTRAIN_SECRET_FILE", str(path))
    nodes = Nodes(rendezvous="head.example:4000", rank=0, fewest=2, most=2, per_node=2)
    found = a_coordinator(nodes)._problem(hello(node, "b", 2, "", ""))
    assert ("at which address" in str(found)) == refused


def test_a_node_whose_coordinator_is_gone_says_so() -> None:
    heard: list[HostMessage] = []

    def receive(peer: bytes, message: HostMessage) -> None:
        heard.append(message)
        server.send(peer, Welcome("s" * 40, sys.executable))
        threading.Thread(target=server.close).start()

    nodes = Nodes(rendezvous="127.0.0.1:1", rank=1, fewest=2, most=2, per_node=2)
    server = ControlServer("127.0.0.1", 0, nodes_secret(nodes), receive, print)
    server.start()
    nodes = dataclasses.replace(nodes, rendezvous=f"127.0.0.1:{server.port}")
    with pytest.raises(PeerMissingError, match=r"\(node 0\) has ended without a message"):
        join_nodes(nodes, [sys.executable, "train.py"])
    assert heard == [hello(1, "", 2, "127.0.0.1", "127.0.0.1", ["train.py"])]


def by_ssh(slots: dict[str, int], **options: Any) -> SSHLauncher:
    hosts = SSHHosts(slots=slots, **options)
    spec = JobSpec(command=["python"], workers=hosts.workers, launcher="ssh", hosts=hosts)
    return SSHLauncher(Session(), spec)


def test_the_workers_of_hosts_with_spares() -> None:
    slots = {"a": 2, "b": 3, "c": 1}
    for options, workers, fewest in (
        ({}, 6, 6),
        ({"most": 2, "fewest": 2}, 5, 5),
        ({"most": 2, "fewest": 1}, 5, 1),
        ({"most": 3, "fewest": 2}, 6, 3),
    ):
        hosts = SSHHosts(slots=slots, **options)  # type: ignore[arg-type]
        assert (hosts.workers, hosts.fewest_workers) == (workers, fewest)
    with pytest.raises(ConfigurationError, match="asks for 4 hosts, and 3 are named: a, b, c"):
        SSHHosts(slots=slots, most=4)


def test_a_job_by_ssh_does_without_hosts_beyond_those_that_it_needs() -> None:
    launcher = by_ssh({"localhost": 2, "b": 2, "c": 2}, most=2, fewest=2)
    with launcher.session.opened():
        launcher._register(print, hello(0, "a", 2, "", ""))
        launcher._fail(ConfigurationError("b: no script"))  # its agent says why,
        launcher._fail(PeerMissingError("b ended"))  # and then ends
        assert launcher._failure is None and launcher._missing(1.0) == ""
        launcher._register(print, hello(2, "c", 2, "", ""))
        assert launcher._missing(1.0) is None
        launcher._fail(PeerMissingError("c ended"))
    assert str(launcher._failure) == "b: no script"


def test_a_job_by_ssh_needs_all_hosts_if_none_is_spare() -> None:
    launcher = by_ssh({"localhost": 2, "b": 2})
    launcher._fail(ConfigurationError("b: no script"))
    assert str(launcher._failure) == "b: no script"


def test_a_pipe_that_is_silent_for_too_long_is_given_up() -> None:
    clock, heard, ended = GivenClock(), list[HostMessage | PeerMismatchError](), threading.Event()
    ours, theirs = os.pipe(), os.pipe()
    connection = PipeConnection(theirs[0], ours[1], heard.append, ended.set, LEASE, clock, lease=True)
    os.write(theirs[1], b"a line of the remote shell\n")
    clock.pass_by(10 * LEASE)  # before the first message there is no limit
    os.write(theirs[1], encode(End(0)) + b"\n")
    wait_until(lambda: heard == [End(0)])
    for beat in range(3):
        clock.pass_by(LEASE - 1)
        os.write(theirs[1], b"\n" if beat < 2 else encode(End(1)) + b"\n")
        wait_until(lambda: not select.select([theirs[0]], [], [], 0)[0])
    wait_until(lambda: End(1) in heard)
    assert not ended.is_set()
    while not ended.wait(0.05):
        clock.pass_by(LEASE)
    connection.close()
    os.close(ours[0])
    os.close(theirs[1])


def test_a_stop_of_this_process_is_no_silence_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the limit is a lease, by which the other side has started the tasks elsewhere meanwhile."""
    monkeypatch.setattr(connection_module, "_CHECK", 10)
    for lease in (False, True):
        clock, heard, ended = GivenClock(), list[HostMessage | PeerMismatchError](), threading.Event()
        ours, theirs = os.pipe(), os.pipe()
        connection = PipeConnection(theirs[0], ours[1], heard.append, ended.set, LEASE, clock, lease=lease)
        os.write(theirs[1], encode(End(0)) + b"\n")
        wait_until(lambda heard=heard: heard == [End(0)])
        clock.pass_by(3600.0)
        if not lease:
            wait_until(lambda found=connection: found._running.since_check() == 0.0)
            assert not ended.is_set()
            os.close(theirs[1])  # the end of the other side is seen at once
        ended.wait()
        # A side that was given up hears nothing more, and ends.
        wait_until(lambda descriptor=ours[0]: not os.read(descriptor, 1 << 16))
        connection.close()
        os.close(ours[0])
        if lease:
            os.close(theirs[1])


def answers_to_invite(folder: Path, **options: Any) -> list[HostMessage]:
    """What an agent of two workers answers to an invitation, until it is welcomed."""
    heard: list[HostMessage] = []
    received = threading.Event()

    def receive(message: HostMessage | PeerMismatchError) -> None:
        heard.append(message)  # type: ignore[arg-type]
        received.set()

    ours, theirs = os.pipe(), os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "dtrain.launch.hosts.agent"], stdin=ours[0], stdout=theirs[1]
    ) as agent:
        for descriptor in (ours[0], theirs[1]):
            os.close(descriptor)
        connection = PipeConnection(theirs[0], ours[1], receive, received.set, 60.0)
        connection.send(Invite(1, "b", 2, str(folder), {}, None, **options))
        received.wait()
        connection.close()
        agent.wait()
    return heard


def test_an_agent_tells_the_address_of_its_interface(tmp_path: Path) -> None:
    (answer,) = answers_to_invite(tmp_path, interface="lo")
    assert isinstance(answer, Hello) and answer.address == "127.0.0.1"
    (answer,) = answers_to_invite(tmp_path, interface="eth77")
    assert isinstance(answer, Refused) and "There is no network interface 'eth77'" in answer.reason
    assert "lo" in answer.hint


def test_an_agent_refuses_a_share_of_gpus_that_it_does_not_have(tmp_path: Path) -> None:
    (answer,) = answers_to_invite(tmp_path, gpus_per_worker=2)
    assert isinstance(answer, Refused) and "0 GPUs for 2 workers" in answer.reason


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--interface eth77", "--interface is for a job on several machines"),
        (
            "--nnodes 2 --node-rank 0 --rendezvous localhost:4000 --interface eth77",
            "There is no network interface 'eth77'",
        ),
        (
            "--nnodes 2 --node-rank 1 --rendezvous localhost:4000 --interface eth77",
            "There is no network interface 'eth77'",
        ),
        ("--hosts a,b --nnodes 3", "--nnodes asks for 3 hosts, and 2 are named: a, b"),
        ("--hosts a,b --nnodes 1:2 --ps 1", "min_workers is 1"),
        ("--nproc-per-node auto", "--nproc-per-node is for a job on several machines"),
        (
            "--nnodes 2 --node-rank 1",
            "--nnodes and --node-rank are for a job on several machines, but --rendezvous is",
        ),
        ("--nnodes 3:2 --node-rank 0 --rendezvous localhost:4000", "3 is more than 2"),
        ("--nnodes 2 --node-rank 0 --rendezvous localhost", "localhost"),
        ("--nnodes 2 --node-rank 0 --rendezvous localhost:4000 -n 3", "--workers is for one machine"),
        ("--nnodes 2 --node-rank 0 --rendezvous localhost:4000 --mpi", "--mpi is for one machine"),
        (
            "--nnodes 2 --node-rank 1 --rendezvous localhost:4000 --secret-file ~/no-secret",
            f"{Path.home()}/no-secret, cannot be read",
        ),
    ],
)
def test_options_of_nodes_that_cannot_be(options: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *options.split(), "-m", "this"]) != 0
    assert part in capsys.readouterr().err
