"""Topology: what it reads from TF_CONFIG, and what it says of a TF_CONFIG that is wrong."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

import dtrain
from dtrain import environments
from dtrain.base.tcp import split_address
from dtrain.environments import settings
from dtrain.environments.topology import Task, Topology
from dtrain.errors import ClusterConfigError, ConfigurationError
from refusals import refused

TWO = {"worker": ["a:1", "b:2"]}


def config(cluster: Any, job: Any = "worker", index: Any = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.mark.parametrize("text", [None, "", "  \n", "{}", " {} "])
def test_no_cluster(text: str | None) -> None:
    assert Topology.from_tf_config(text) is None


def test_workers_only() -> None:
    topology = Topology.from_tf_config(config(TWO, index=1))
    assert topology is not None
    assert (topology.rank, topology.world_size, topology.is_chief) == (1, 2, False)
    assert topology.address == "b:2"
    assert topology.tasks() == (Task("worker", 0), Task("worker", 1))
    assert str(topology.task) == "worker 1"


def test_chief_comes_first_whatever_the_order_in_the_text() -> None:
    jobs = {"evaluator": ["e:1"], "ps": ["p:1", "p:2"], "worker": ["w:1", "w:2"], "chief": ["c:1"]}
    views = {}
    for job, addresses in jobs.items():
        for index in range(len(addresses)):
            views[job, index] = Topology.from_tf_config(config(jobs, job, index))
    assert [views[t].rank for t in (("chief", 0), ("worker", 0), ("worker", 1))] == [0, 1, 2]
    assert [key for key, view in views.items() if view.is_chief] == [("chief", 0)]
    assert {view.world_size for view in views.values()} == {3}
    assert views["ps", 1].address == "p:2"
    assert not views["ps", 0].is_training_task
    assert [str(t) for t in views["ps", 0].tasks()] == [
        "chief 0",
        "worker 0",
        "worker 1",
        "ps 0",
        "ps 1",
        "evaluator 0",
    ]
    with refused(ClusterConfigError, "ps 0", "rank"):
        _ = views["ps", 0].rank


@pytest.mark.parametrize(
    ("jobs", "job", "local_ranks"),
    [
        ({"worker": ["a:1", "a:2", "b:1", "a:3"]}, "worker", [0, 1, 0, 2]),
        ({"chief": ["a:1"], "worker": ["a:2", "[fd77::2]:1", "[fd77::2]:2"]}, "worker", [1, 0, 1]),
        ({"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4", "a:5"]}, "worker", [0, 1]),
        ({"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["b:4", "a:5"]}, "ps", [0, 0]),
    ],
)
def test_a_local_rank_counts_the_workers_of_a_host(
    jobs: dict[str, list[str]], job: str, local_ranks: list[int]
) -> None:
    views = [Topology.from_tf_config(config(jobs, job, index)) for index in range(len(jobs[job]))]
    assert [view.local_rank for view in views if view is not None] == local_ranks


@pytest.mark.parametrize(
    ("variables", "local_rank"),
    [
        ({}, 0),
        ({"SLURM_LOCALID": "3"}, 0),  # no job: any program in an allocation has it
        ({"TF_CONFIG": config({"worker": ["a:1", "a:2"]}, index=1)}, 1),
        ({"TF_CONFIG": config({"worker": ["a:1", "a:2"]}, index=1), "DTRAIN_LOCAL_RANK": "5"}, 5),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "SLURM_LOCALID": "0",
            },
            1,
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2"}, 2),
        ({"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}, 3),
    ],
)
def test_the_local_rank_comes_from_the_launcher_the_starter_or_the_addresses(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], local_rank: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dtrain.local_rank() == local_rank


def test_worker_0_is_chief_where_there_is_no_chief_job() -> None:
    topology = Topology.from_tf_config(config(TWO))
    assert topology is not None and topology.is_chief


def test_evaluator_may_stand_outside_the_cluster() -> None:
    topology = Topology.from_tf_config(config(TWO, "evaluator"))
    assert topology is not None and not topology.is_training_task and topology.world_size == 2
    with refused(ClusterConfigError, "evaluator 0", "worker 0, worker 1", "address"):
        _ = topology.address


def test_the_chief_of_parameter_servers_may_stand_outside_the_cluster() -> None:
    servers = {**TWO, "ps": ["c:3"]}
    topology = Topology.from_tf_config(config(servers, "chief"))
    assert topology is not None and topology.is_coordinated and topology.is_chief
    assert (topology.rank, topology.world_size, topology.has_address) == (0, 3, False)
    with refused(ClusterConfigError, "chief 0", "worker 0, worker 1, ps 0", "address"):
        _ = topology.address
    named = topology.with_chief_at("d:4")
    assert (named.rank, named.world_size, named.is_chief, named.address) == (0, 3, True, "d:4")
    assert [str(task) for task in named.servers()] == ["worker 0", "worker 1", "ps 0"]
    worker = Topology.from_tf_config(config(servers, index=1))
    assert worker is not None and worker.servers() == topology.servers() and not worker.is_chief
    for other in (config(TWO, "chief"), config(servers, "chief", 1)):
        with refused(ClusterConfigError, "TF_CONFIG", "chief", '"chief"', "worker"):
            Topology.from_tf_config(other)


def test_other_keys_are_left_alone() -> None:
    text = json.dumps({**json.loads(config(TWO)), "environment": "cloud", "rpc_layer": "grpc"})
    assert Topology.from_tf_config(text) == Topology.from_tf_config(config(TWO))


def test_round_trip_hash_and_pickle() -> None:
    topology = Topology({"worker": ("a:1", "b:2"), "ps": ("[::1]:3",)}, "ps", 0)
    again = Topology.from_tf_config(topology.to_tf_config())
    assert again == topology and hash(again) == hash(topology)
    assert pickle.loads(pickle.dumps(topology)) == topology


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{'cluster': 1}", "not JSON"),
        ("worker0", "not JSON"),
        ('{"cluster": {"worker": ["a:1"]}', "not JSON"),
        ("[1]", "a JSON list, not an object"),
        ("null", "a JSON null, not an object"),
        ("3", "a JSON number, not an object"),
        ('{"task": {"type": "worker", "index": 0}}', 'no "cluster"'),
        ('{"cluster": {"worker": ["a:1"]}}', 'no "task"'),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}', '"worker" appears twice'),
        ('{"cluster": [], "task": {}}', '"cluster" is a JSON list'),
        ('{"cluster": {"worker": ["a:1"]}, "task": 0}', '"task" is a JSON number'),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', '"task" has no "type"'),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', '"task" has no "index"'),
        (config({}), '"cluster" is empty'),
        (config({"workers": ["a:1"]}), "unknown job 'workers'"),
        (config({"master": ["a:1"], "worker": ["b:1"]}), "unknown job 'master'"),
        (config({"worker": []}), 'job "worker" has no address'),
        (config({"worker": "a:1"}), "a JSON string, not a list"),
        (config({"worker": {"0": "a:1"}}), "a JSON object, not a list"),
        (config({"worker": None}), "a JSON null, not a list"),
        (config({"worker": [1]}), "address of worker 0 is 1, not a string"),
        (config({"worker": ["a:1", "b"]}), "address of worker 1: 'b' is an address without a port"),
        (config({"worker": ["::1"]}), "without a port"),
        (config({"worker": [":1"]}), "without a host"),
        (config({"worker": ["a:"]}), "port ''"),
        (config({"worker": ["a:x"]}), "port 'x'"),
        (config({"worker": ["a:0"]}), "port '0'"),
        (config({"worker": ["a:65536"]}), "port '65536'"),
        (config({"worker": ["a:-1"]}), "port '-1'"),
        (config({"worker": ["grpc://a:1"]}), "not a plain host:port"),
        (config({"worker": ["a b:1"]}), "not a plain host:port"),
        (config({"worker": ["a:1", "a:1"]}), "'a:1' is repeated: worker 0 and worker 1"),
        (config({"worker": ["a:1"], "ps": ["A:1"]}), "repeated: worker 0 and ps 0"),
        (config({"worker": ["localhost:1", "127.0.0.1:1"]}), "repeated"),
        (config({"chief": ["a:1", "b:1"]}), 'job "chief" has 2 addresses'),
        (config({"ps": ["a:1"]}, "ps"), "no task that trains"),
        (config(TWO, "boss"), "unknown job 'boss'"),
        (config(TWO, None), "unknown job None"),
        (config(TWO, ["worker"]), "unknown job"),
        (config(TWO, "chief"), 'cluster has no job "chief"'),
        (config(TWO, "ps"), 'cluster has no job "ps"'),
        (config(TWO, index="0"), "index in \"task\" is '0', a str"),
        (config(TWO, index=0.0), "0.0, a float"),
        (config(TWO, index=True), "True, a bool"),
        (config(TWO, index=None), "None"),
        (config(TWO, index=2), "is 2, but the job"),
        (config(TWO, index=-1), "is -1, but the job"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        Topology.from_tf_config(text)
    assert said in caught.value.message
    assert caught.value.message.startswith("TF_CONFIG is wrong: ")
    assert caught.value.hint


def test_a_topology_made_by_hand_is_checked_as_well() -> None:
    with refused(ClusterConfigError, '"task"', "index", "1 address(es)", "from 0 to 0"):
        Topology({"worker": ("a:1",)}, "worker", 1)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("[::1]:22", ("::1", 22)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_split_address(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


def test_current_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert environments.current() is None
    monkeypatch.setenv("TF_CONFIG", config(TWO, index=1))
    topology = environments.current()
    assert topology is not None and topology.rank == 1


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DTRAIN_LAUNCHED", "DTRAIN_PEER_TIMEOUT", "DTRAIN_DEVICES_PER_WORKER"):
        monkeypatch.delenv(name, raising=False)
    assert settings.peer_timeout() == 300
    assert settings.devices_per_worker() is None
    monkeypatch.setenv("DTRAIN_LAUNCHED", "1")
    assert settings.peer_timeout() == 120
    monkeypatch.setenv("DTRAIN_PEER_TIMEOUT", "2.5")
    monkeypatch.setenv("DTRAIN_DEVICES_PER_WORKER", "2")
    assert settings.peer_timeout() == 2.5
    assert settings.devices_per_worker() == 2


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf"])
def test_bad_peer_timeout(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DTRAIN_PEER_TIMEOUT", text)
    with refused(ConfigurationError, "DTRAIN_PEER_TIMEOUT", f"'{text}'"):
        settings.peer_timeout()


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5"])
def test_bad_devices_per_worker(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DTRAIN_DEVICES_PER_WORKER", text)
    with refused(ConfigurationError, "DTRAIN_DEVICES_PER_WORKER", f"'{text}'"):
        settings.devices_per_worker()
