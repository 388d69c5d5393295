"""Chief, workers and parameter servers as processes of TensorFlow: from the rendezvous to the end."""

from __future__ import annotations

import math
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, PeerMissingError, PortInUseError
from dtrain.process_group.serving import check_roles, wait_for_servers
from refusals import refused
from server_processes import ByHand, ended, launch, topology, wait_until_listening, write_program


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    return lambda chief: write_program(tmp_path, chief, counting="work(" in chief)


def test_a_job_lives_through_the_death_of_a_worker_and_all_end_well(program: Callable[[str], str]) -> None:
    script = program(
        """
        import dtrain
        print("who:", dtrain.rank(), dtrain.world_size(), dtrain.is_chief(), dtrain.broadcast("mine"))
        dtrain.barrier()
        before = status("worker")
        print("asked:", sorted(before), serving.ask("ps", 0, {"ask": "the time"}, 60.0))
        done = work(for_times(5))
        os.kill(before["pid"], signal.SIGKILL)
        answer = serving.ask("worker", 0, {"ask": "status"}, 60.0)  # None, or the new worker answers
        print("gone:", answer is None or answer["pid"] != before["pid"])
        done += work(for_times(5))
        while (after := status("worker").get("pid", before["pid"])) == before["pid"]:
            done += work(for_times(5))
        print("exact:", counter.numpy() == done, "pids:", before["pid"], after)
        """
    )
    done = launch("--workers", "2", "--ps", "1", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[chief 0] who: 0 1 True mine" in done.stdout
    assert "asked: ['host', 'incarnation', 'pid', 'started', 'task'] {'error':" in done.stdout
    assert "gone: True" in done.stdout
    assert done.stdout.count("only the chief goes on") == 1
    before, after = re.findall(r"exact: True pids: (\d+) (\d+)", done.stdout)[0]
    started = re.findall(r"worker 0 started, process (\d+), (\S+)", done.stderr)
    assert [pid for pid, _ in started] == [before, after]
    assert len({address for _, address in started}) == 1
    for task in ("worker 0", "worker 1", "ps 0"):  # they ended by themselves, as a program does
        assert f"[{task}] finally" in done.stdout and f"[{task}] atexit" in done.stdout
    assert "failed:" not in done.stderr


def test_an_exception_of_the_chief_is_every_servers(
    program: Callable[[str], str], by_hand: ByHand, cluster: dict[str, list[str]]
) -> None:
    script = program("raise ValueError('what went wrong')")
    processes = {job: by_hand.start(job, script) for job in ("worker", "ps", "chief")}
    results = {job: ended(process) for job, process in processes.items()}
    assert {job: status for job, (status, _) in results.items()} == {"chief": 1, "worker": 1, "ps": 1}
    for job in ("worker", "ps"):
        output = results[job][1]
        assert (
            f"TaskFailedError: chief 0 ({cluster['chief'][0]}) failed: ValueError: what went wrong" in output
        )
        assert "Hint: See the output of the chief" in output
        assert "finally" in output and "atexit" in output
        assert "only the chief goes on" not in output


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda signum: signum.name)
def test_the_chief_ends_well_though_its_servers_went_first(
    program: Callable[[str], str], by_hand: ByHand, signum: signal.Signals
) -> None:
    script = program(
        f"""
        work(for_times(1))
        for pid in [status("worker")["pid"], status("ps")["pid"]]:
            os.kill(pid, {signum:d})
        print("over", flush=True)
        """
    )
    processes = {job: by_hand.start(job, script) for job in ("worker", "ps", "chief")}
    status, output = ended(processes["chief"])
    assert status == 0, output
    assert output.index("over") < output.index("atexit")


# A cluster of workers and servers only, as in TensorFlow's guide. `worker 0` and `ps 0` serve as dtrain does;
# the chief itself starts the other worker, with TensorFlow's own server.
OUTSIDE = """
import os, sys
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import tensorflow as tf
import dtrain

from dtrain import environments
from dtrain.process_group import serving

before = environments.current()
if before.task_type == "chief":
    own = tf.distribute.Server({job: list(found) for job, found in before.jobs.items()}, "worker", 1)
strategy = dtrain.ParameterServerStrategy(max_staleness=0)
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
y = np.tanh(x.sum(axis=1, keepdims=True))

def trained():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return int(model.optimizer.iterations), model.evaluate(x, y, batch_size=32, verbose=0)

with strategy.scope():
    there = trained()
for _ in range(100):  # a request to the server of this very process must not wait for what the seed waits for
    serving.ask("worker", 1, {"ask": "status"}, 0.001)
    tf.random.set_seed(1)
here = trained()
print("iterations:", there[0], here[0], "near:", abs(there[1] - here[1]) < 2e-4 * here[1], flush=True)
print("who:", dtrain.rank(), dtrain.world_size(), dtrain.is_chief(), flush=True)
if "fail" in sys.argv:
    raise ValueError("what went wrong")
"""


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_chief_outside_the_cluster(
    tmp_path: Path, by_hand: ByHand, cluster: dict[str, list[str]], fails: bool
) -> None:
    script = tmp_path / "outside.py"
    script.write_text(OUTSIDE)
    cluster["worker"] += cluster.pop("chief")
    arguments = ["fail"] if fails else []
    processes = {job: by_hand.start(job, str(script), *arguments) for job in ("worker", "ps", "chief")}
    results = {job: ended(process) for job, process in processes.items()}
    output = results["chief"][1]
    statuses = {job: status for job, (status, _) in results.items()}
    assert statuses == dict.fromkeys(processes, int(fails)), results
    assert "iterations: 40 40 near: True" in output and "who: 0 1 True" in output
    assert "TensorFlow's own server" not in output  # the one of its own process ends with it
    if fails:
        said = r"TaskFailedError: chief 0 \(\S+:\d+\) failed: ValueError: what went wrong"
        assert re.search(said, results["ps"][1])


def test_a_chief_that_does_not_come(program: Callable[[str], str], by_hand: ByHand) -> None:
    worker = by_hand.start("worker", program(""), DTRAIN_PEER_TIMEOUT="1")
    status, output = ended(worker)
    assert status == 1
    assert re.search(r"PeerMissingError: The chief \(127\.0\.0\.1:\d+\) did not appear within \d+ s", output)
    assert "DTRAIN_PEER_TIMEOUT" in output


def test_a_server_on_a_port_that_is_taken_and_a_signal(
    program: Callable[[str], str], by_hand: ByHand, cluster: dict[str, list[str]]
) -> None:
    script = program("")
    with socket.create_server(("127.0.0.1", int(cluster["ps"][0].partition(":")[2]))):
        ps, worker = by_hand.start("ps", script), by_hand.start("worker", script)
        status, output = ended(ps)
    assert status == 1
    assert "PortInUseError" in output and cluster["ps"][0] in output
    wait_until_listening(cluster["worker"][0], worker)
    worker.terminate()
    assert ended(worker)[0] == -signal.SIGTERM


def test_servers_that_are_missing_are_named(cluster: dict[str, list[str]]) -> None:
    with socket.create_server(("127.0.0.1", int(cluster["worker"][0].partition(":")[2]))):
        with pytest.raises(PeerMissingError) as caught:
            wait_for_servers(topology(cluster), timeout=0.5)
        assert f"Missing: ps 0 ({cluster['ps'][0]})." in str(caught.value)
        with socket.create_server(("127.0.0.1", int(cluster["ps"][0].partition(":")[2]))):
            wait_for_servers(topology(cluster), timeout=0.5)


def test_who_is_waited_for_is_said(cluster: dict[str, list[str]]) -> None:
    def log(line: str) -> None:
        raise RuntimeError(line)  # else it waits for ever

    with pytest.raises(RuntimeError) as said:
        wait_for_servers(topology(cluster), timeout=math.inf, log=log, log_every=0.1)
    assert str(said.value).startswith(f"waiting for worker 0 ({cluster['worker'][0]}), ps 0 (")


def test_the_chiefs_own_port(cluster: dict[str, list[str]]) -> None:
    with (
        socket.create_server(("127.0.0.1", int(cluster["chief"][0].partition(":")[2]))),
        refused(PortInUseError, cluster["chief"][0]),
    ):
        # This process stands for another one.
        wait_for_servers(topology(cluster), timeout=0.5, is_own_port=lambda port: False)


def test_a_server_does_not_wait_for_servers(cluster: dict[str, list[str]]) -> None:
    with refused(ClusterConfigError, "ps 0", "chief"):
        wait_for_servers(topology(cluster, "ps"), timeout=0.5)


@pytest.mark.parametrize(
    ("jobs", "missing"),
    [
        ({"worker": 2}, "no ps, only worker"),
        ({"chief": 1, "worker": 2}, "no ps, only chief, worker"),
        ({"chief": 1, "ps": 1}, "no worker, only chief, ps"),
        ({"chief": 1}, "no worker and no ps, only chief"),
    ],
)
def test_a_cluster_that_lacks_a_job(jobs: dict[str, Any], missing: str) -> None:
    addresses = {job: tuple(f"{job}{i}:2222" for i in range(count)) for job, count in jobs.items()}
    with refused(ClusterConfigError, missing, "--ps"):
        check_roles(Topology(addresses, next(iter(jobs)), 0))
