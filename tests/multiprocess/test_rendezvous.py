"""The rendezvous before training, among real processes over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain.base.tcp import answers_at, this_process_listens_on
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, PortInUseError
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.process_group.rendezvous import run_rendezvous
from dtrain.process_group.rendezvous_server import describe_difference
from dtrain.process_group.signed_frames import PROTOCOL, SignedFrames
from given_clock import GivenClock
from processes import wait_until
from refusals import refused

LIMIT = 240.0

# A task that meets its peers `times` times and then tells, as JSON on its standard output, how that went.
TASK = """
import json, sys
from dtrain import environments
from dtrain.process_group.rendezvous import run_rendezvous
from dtrain.errors import DtrainError
times, timeout, use_tensorflow, secret = json.loads(sys.argv[1])
secret = None if secret is None else secret.encode()
topology = environments.current()
met = 0
try:
    for _ in range(times):
        run_rendezvous(topology, timeout=timeout, secret=secret)
        met += 1
    error, message = "", ""
except DtrainError as caught:
    error, message = type(caught).__name__, str(caught)
total = 0.0
if use_tensorflow:
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    @tf.function
    def step():
        return strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
    total = float(step())
print(json.dumps({"met": met, "error": error, "message": message, "total": total}))
"""


@pytest.fixture
def ports() -> Iterator[Callable[[int], list[int]]]:
    """Free ports, reserved until the test ends, as the launcher does it."""
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(reserve_ports(count))


def local(ports: list[int]) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ports]


class Tasks:
    """Processes that run TASK; all are killed at the end."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        cluster: Mapping[str, list[str]],
        index: int,
        *,
        job: str = "worker",
        times: int = 1,
        timeout: float | None = 600.0,
        tensorflow: bool = False,
        secret: str | None = "",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        process = subprocess.Popen(
            [sys.executable, "-c", TASK, json.dumps([times, timeout, tensorflow, secret])],
            env={**os.environ, "TF_CONFIG": config, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def results(self, *processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
        results = []
        for process in processes or self.started:
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, err
            results.append({**json.loads(out.splitlines()[-1]), "stderr": err})
        return results


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    started = Tasks()
    yield started
    for process in started.started:
        process.kill()
        process.communicate()


def wait_for_listener(port: int) -> None:
    """Waits until the first task of a rendezvous takes connections."""
    wait_until(lambda: answers_at(f"127.0.0.1:{port}"))


def wait_for_connection(process: subprocess.Popen[str], port: int) -> None:
    """Waits until a task is connected to the first one, which accepts it and its hello at once."""

    def connected() -> bool:
        connections = psutil.Process(process.pid).net_connections("tcp")
        return any(
            connection.status == psutil.CONN_ESTABLISHED
            and connection.raddr
            and connection.raddr.port == port
            for connection in connections
        )

    wait_until(connected)


def errors_of(results: list[dict[str, Any]]) -> set[str]:
    return {result["error"] for result in results}


def test_all_meet_again_and_again(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    cluster = {"worker": local(ports(4))}
    for index in range(4):
        tasks.start(cluster, index, times=5)
    results = tasks.results()
    assert errors_of(results) == {""} and {r["met"] for r in results} == {5}


def test_a_chief_meets_workers_while_other_jobs_stay_away(
    tasks: Tasks, ports: Callable[[int], list[int]]
) -> None:
    addresses = local(ports(4))
    cluster = {"ps": addresses[:1], "worker": addresses[1:3], "chief": addresses[3:]}
    tasks.start(cluster, 0, job="chief")
    tasks.start(cluster, 0)
    tasks.start(cluster, 1)
    tasks.start(cluster, 0, job="ps")
    assert errors_of(tasks.results()) == {""}


@pytest.mark.long
def test_tensorflow_serves_on_the_port_afterwards(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    cluster = {"worker": local(ports(2))}
    for index in range(2):
        tasks.start(cluster, index, times=2, tensorflow=True)
    results = tasks.results()
    assert errors_of(results) == {""} and {r["total"] for r in results} == {2.0}


def test_the_first_task_may_come_last(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    cluster = {"worker": local(ports(2))}
    with socket.create_server(("127.0.0.1", int(cluster["worker"][0].rpartition(":")[2]))) as nobody:
        tasks.start(cluster, 1)
        nobody.accept()[0].close()  # it has tried to connect
    tasks.start(cluster, 0)
    assert errors_of(tasks.results()) == {""}


def test_a_missing_first_task_is_named(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    addresses = local(ports(2))
    tasks.start({"worker": addresses}, 1, timeout=None, env={"DTRAIN_PEER_TIMEOUT": "1"})
    (result,) = tasks.results()
    assert result["error"] == "PeerMissingError"
    assert f"Missing: worker 0 ({addresses[0]})." in result["message"]


def test_a_worker_that_dies_while_waiting_may_be_started_again(
    tasks: Tasks, ports: Callable[[int], list[int]]
) -> None:
    numbers = ports(3)
    cluster = {"worker": local(numbers)}
    first = tasks.start(cluster, 0)
    wait_for_listener(numbers[0])
    dying = tasks.start(cluster, 1)
    wait_for_connection(dying, numbers[0])
    dying.kill()
    dying.wait()
    again, last = tasks.start(cluster, 1), tasks.start(cluster, 2)
    assert errors_of(tasks.results(first, again, last)) == {""}


def start_two(cluster: Mapping[str, list[str]], tasks: Tasks, port: int) -> None:
    """Starts workers 0 and 1, which then wait: after an error, the first one tells others for 5 s only."""
    tasks.start(cluster, 0, secret="known to all")
    wait_for_listener(port)
    wait_for_connection(tasks.start(cluster, 1, secret="known to all"), port)


def test_a_cluster_that_differs_is_said_on_all(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    numbers = ports(3)
    addresses = local(numbers)
    start_two({"worker": addresses}, tasks, numbers[0])
    tasks.start({"worker": [*addresses[:2], "127.0.0.1:9"]}, 2, secret="known to all")
    for result in tasks.results():
        assert result["error"] == "PeerMismatchError"
        assert f"worker 2 at {addresses[2]!r}" in result["message"]
        assert "it at '127.0.0.1:9'" in result["message"]


def test_a_smaller_cluster_is_said_on_all(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    addresses = local(ports(3))
    tasks.start({"worker": addresses}, 0, secret="known to all")
    tasks.start({"worker": addresses[:2]}, 1, secret="known to all")
    for result in tasks.results():
        assert result["error"] == "PeerMismatchError"
        assert '3 task(s) of job "worker"' in result["message"] and "has 2" in result["message"]


@pytest.mark.parametrize("claimed", [0, 1])
def test_two_processes_with_one_task(tasks: Tasks, ports: Callable[[int], list[int]], claimed: int) -> None:
    numbers = ports(3)
    cluster = {"worker": local(numbers)}
    start_two(cluster, tasks, numbers[0])
    tasks.start(cluster, claimed, secret="known to all")
    for result in tasks.results():
        assert result["error"] == "PeerMismatchError"
        assert f"Two processes say that they are worker {claimed}" in result["message"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_port_in_use_is_said_on_all(
    tasks: Tasks, ports: Callable[[int], list[int]], everywhere: bool
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0" if everywhere else "127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        numbers = ports(2)
        cluster = {"worker": [*local(numbers), taken]}
        start_two(cluster, tasks, numbers[0])
        tasks.start(cluster, 2, secret="known to all")
        for result in tasks.results():
            assert result["error"] == "PortInUseError"
            assert taken in result["message"]


def test_the_first_tasks_port_in_use(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        tasks.start({"worker": [taken, *local(ports(1))]}, 0)
        (first,) = tasks.results()
    assert first["error"] == "PortInUseError" and taken in first["message"]


def test_a_listener_of_this_very_process_is_in_the_way_as_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert this_process_listens_on(port)
        with refused(PortInUseError, f"127.0.0.1:{port}"):
            run_rendezvous(Topology({"worker": (f"127.0.0.1:{port}",)}, "worker", 0), clock=GivenClock())
    assert not this_process_listens_on(port)


def messages(*contents: Any) -> bytes:
    """The first frames of a connection without a signature, one for each value."""
    frames = SignedFrames(None, connected=True)
    return b"".join(part for each in contents for part in frames.encode(255, 0, json.dumps(each).encode()))


def test_unauthenticated_connections_do_not_disturb(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    numbers = ports(2)
    cluster = {"worker": local(numbers)}
    tasks.start(cluster, 0)
    wait_for_listener(numbers[0])
    with contextlib.ExitStack() as stack:
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(100_000),
            messages({"dtrain": "hello"}),
            messages({"dtrain": "gave up"}),
            messages({"dtrain": "hello", "job": ["worker"], "index": True, "process": {}}),
            messages([]),
            messages({"dtrain": "hello"})[:-1],
            b"".join(SignedFrames(None, connected=True).encode(255, 0, b"[" * 100_000)),
            b"".join(SignedFrames(None, connected=True).encode(255, 0, b"x" * 3_000_000)),
        ):
            intruder = stack.enter_context(socket.create_connection(("127.0.0.1", numbers[0]), timeout=LIMIT))
            with contextlib.suppress(OSError):
                intruder.sendall(garbage)
        tasks.start(cluster, 1)
        assert errors_of(tasks.results()) == {""}


EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\r\nworker 0: all is well " + "A" * 3000


def hello(**content: Any) -> dict[str, Any]:
    usual = {
        "dtrain": "hello",
        "protocol": PROTOCOL,
        "job": "worker",
        "index": 1,
        "process": EVIL,
        "problem": "",
    }
    return {**usual, **content}


@pytest.mark.parametrize("secret", ["", "known to all"])
def test_a_well_formed_message_without_the_secret_changes_nothing(
    tasks: Tasks, ports: Callable[[int], list[int]], secret: str
) -> None:
    numbers = ports(2)
    cluster = {"worker": local(numbers)}
    tasks.start(cluster, 0, secret=secret)
    wait_for_listener(numbers[0])
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    with contextlib.ExitStack() as stack:
        for sent in (
            messages(hello(cluster=cluster, index=7)),
            messages(hello(cluster=cluster, job=EVIL, index=10**4000)),
            messages(hello(cluster=cluster, protocol=1)),
            messages(hello()),
            messages(hello(cluster={"worker": [*local(numbers), EVIL]})),
            messages(hello(cluster={EVIL: [deep], "worker": deep})),
            messages(hello(cluster=cluster, problem=EVIL)),
            messages(hello(cluster=cluster, index=0)),
            messages(hello(cluster=cluster, index=0, protocol=[deep], problem=deep)),
            messages(hello(cluster=cluster), {"dtrain": "gave up"})
            if secret
            else messages(hello(problem="x")),
        ):
            intruder = stack.enter_context(socket.create_connection(("127.0.0.1", numbers[0]), timeout=LIMIT))
            intruder.sendall(sent)
        for _ in range(80):  # silent ones
            stack.enter_context(socket.create_connection(("127.0.0.1", numbers[0]), timeout=LIMIT))
        tasks.start(cluster, 1, secret=secret)
        results = tasks.results()
    assert errors_of(results) == {""}
    said = results[0]["stderr"]
    assert "a process was refused" in said
    assert secret or "runs another version of dtrain" in said
    assert all(sign.isprintable() for line in said.splitlines() for sign in line)
    assert max(map(len, said.splitlines())) < 600


def test_processes_of_one_user_on_one_machine_share_a_secret(
    tasks: Tasks, ports: Callable[[int], list[int]]
) -> None:
    numbers = ports(2)
    cluster = {"worker": local(numbers)}
    tasks.start(cluster, 0, secret=None)
    wait_for_listener(numbers[0])
    with socket.create_connection(("127.0.0.1", numbers[0]), timeout=LIMIT) as intruder:
        intruder.sendall(messages(hello(cluster=cluster), {"dtrain": "gave up"}))
        tasks.start(cluster, 1, secret=None)
        results = tasks.results()
    assert errors_of(results) == {""} and "does not know the secret" in results[0]["stderr"]


def test_no_free_descriptor_is_said(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    numbers = ports(2)
    cluster = {"worker": local(numbers)}
    first = tasks.start(cluster, 0)
    wait_for_listener(numbers[0])
    limit = len(list(Path(f"/proc/{first.pid}/fd").iterdir())) + 1
    resource.prlimit(first.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        for _ in range(limit):  # more than there are free descriptors, whichever the task closes meanwhile
            stack.enter_context(socket.create_connection(("127.0.0.1", numbers[0]), timeout=LIMIT))
        assert first.stderr is not None
        assert "a connection has to wait: Too many open files" in first.stderr.readline()
    tasks.start(cluster, 1)
    assert errors_of(tasks.results()) == {""}


def test_another_job_that_was_given_our_port_does_not_end_ours(
    tasks: Tasks, ports: Callable[[int], list[int]]
) -> None:
    numbers = ports(4)
    first = tasks.start({"worker": local(numbers[:2])}, 0)
    wait_for_listener(numbers[0])
    intruder = tasks.start({"worker": local([numbers[0], *numbers[2:]])}, 0)
    (result,) = tasks.results(intruder)
    assert result["error"] == "PortInUseError"
    second = tasks.start({"worker": local(numbers[:2])}, 1)
    assert errors_of(tasks.results(first, second)) == {""}


def test_an_address_that_this_machine_does_not_have(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    # As behind a translated address: the task serves on every interface instead.
    first, second = ports(2)
    tasks.start({"worker": [f"192.0.2.1:{first}", f"127.0.0.1:{second}"]}, 0)
    wait_for_listener(first)


def test_a_name_for_this_machine(tasks: Tasks, ports: Callable[[int], list[int]]) -> None:
    cluster = {"worker": [f"localhost:{port}" for port in ports(2)]}
    for index in range(2):
        tasks.start(cluster, index)
    assert errors_of(tasks.results()) == {""}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may serve on every port")
def test_a_port_that_this_user_may_not_have() -> None:
    with pytest.raises(ClusterConfigError, match="cannot serve"):
        run_rendezvous(Topology({"worker": ("127.0.0.1:1",)}, "worker", 0))


def test_describe_difference() -> None:
    mine = {"worker": ("a:1",), "chief": ("c:1",)}
    assert describe_difference(mine, {"worker": ["a:1"], "chief": ["c:1"]}, "I", "you") is None
    assert describe_difference(mine, {"worker": ["a:1"]}, "I", "you") == (
        'I has 1 task(s) of job "chief", but you has 0.'
    )
    assert describe_difference(mine, None, "I", "you") == "you did not say what its cluster is."
