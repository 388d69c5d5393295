"""Who a process is in its job, and how processes exchange values outside of training: one, and two."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtrain
from dtrain.errors import ClusterConfigError, ConfigurationError, TaskFailedError
from refusals import refused

LIMIT = 240.0


def test_a_process_alone_is_the_chief_of_a_job_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert (dtrain.rank(), dtrain.world_size(), dtrain.is_chief()) == (0, 1, True)
    dtrain.barrier()
    value = {"any": object()}  # not even pickled
    assert dtrain.broadcast(value) is value


@pytest.mark.parametrize(
    ("jobs", "task", "expected"),
    [
        ({"worker": 2}, ("worker", 1), (1, 2, False)),
        ({"chief": 1, "worker": 2}, ("chief", 0), (0, 3, True)),
        ({"chief": 1, "worker": 2}, ("worker", 0), (1, 3, False)),
        ({"worker": 1, "ps": 1}, ("worker", 0), (0, 1, True)),
    ],
)
def test_what_tf_config_says(
    monkeypatch: pytest.MonkeyPatch,
    jobs: dict[str, int],
    task: tuple[str, int],
    expected: tuple[int, int, bool],
) -> None:
    addresses = {job: [f"{job}{i}:2222" for i in range(count)] for job, count in jobs.items()}
    config = {"cluster": addresses, "task": {"type": task[0], "index": task[1]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert (dtrain.rank(), dtrain.world_size(), dtrain.is_chief()) == expected


def test_a_task_that_does_not_train_has_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert not dtrain.is_chief()
    with refused(ClusterConfigError, "ps 0"):
        dtrain.rank()


def test_with_parameter_servers_the_chief_is_alone_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}

    def become(job: str) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}}))

    become("chief")
    assert (dtrain.rank(), dtrain.world_size(), dtrain.is_chief()) == (0, 1, True)
    dtrain.barrier()
    assert dtrain.broadcast("mine") == "mine"
    for job in ("worker", "ps"):
        become(job)
        assert not dtrain.is_chief()
        for ask in (dtrain.rank, dtrain.world_size, dtrain.barrier):
            with refused(ClusterConfigError, f"{job} 0", "chief", "Make the strategy"):
                ask()


def test_a_tf_config_that_is_wrong_is_said_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{not json")
    for ask in (dtrain.rank, dtrain.world_size, dtrain.is_chief, dtrain.barrier):
        with refused(ClusterConfigError, "TF_CONFIG"):
            ask()


def exchange_all(folder: Path) -> dict[str, Any]:
    """All of the talk between two workers, in one pair of processes: TensorFlow is slow to import.

    They also tell each other by files in a folder how far they are.
    """

    def wait_for(name: str) -> None:
        while not (folder / name).exists():
            time.sleep(0.02)

    seen: dict[str, Any] = {"who": (dtrain.rank(), dtrain.world_size(), dtrain.is_chief())}
    for name, ask in (("barrier", dtrain.barrier), ("broadcast", lambda: dtrain.broadcast(1))):
        try:
            ask()
        except ConfigurationError as error:
            seen[f"{name} too early"] = str(error)

    strategy = dtrain.MultiWorkerMirroredStrategy()
    seen["replicas"] = strategy.num_replicas_in_sync
    me = dtrain.rank()
    values = [
        f"text of {me}",
        me,
        None,
        [me, {"nested": (me, 0.5)}],
        np.full((2, 3), me, "float32"),
        b"\x00" * 300_000,
    ]
    seen["broadcast"] = [dtrain.broadcast(value) for value in values]
    # Only the chief's value is looked at.
    seen["not pickled"] = dtrain.broadcast("chief's" if dtrain.is_chief() else (lambda: None))

    if me == 0:
        (folder / "at the barrier").touch()
        dtrain.barrier()
        (folder / "past the barrier").touch()
    else:
        wait_for("at the barrier")
        time.sleep(0.09)
        seen["past the barrier alone"] = (folder / "past the barrier").exists()
        dtrain.barrier()

    seen["order"] = []
    for i in range(20):
        seen["order"].append(dtrain.broadcast(i if me == 0 else None))

    if me == 0:  # the chief waits for one that does not come in time ...
        try:
            dtrain.barrier(timeout=1)
        except TimeoutError as error:
            seen["timeout"] = (type(error).__name__, str(error))
        (folder / "has given up").touch()
    else:
        wait_for("has given up")
        dtrain.barrier(timeout=LIMIT)
    # ... and they exchange_all again afterwards.
    seen["after"] = dtrain.broadcast("again" if me == 0 else None, timeout=LIMIT)
    return seen


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return dtrain.spawn(exchange_all, workers=2, args=(tmp_path_factory.mktemp("steps"),), timeout=LIMIT)


def test_ranks_in_spawned_workers(exchanged: list[dict[str, Any]]) -> None:
    assert [seen["who"] for seen in exchanged] == [(0, 2, True), (1, 2, False)]
    assert [seen["replicas"] for seen in exchanged] == [2, 2]


@pytest.mark.parametrize("call", ["barrier", "broadcast"])
def test_before_a_strategy_exists(exchanged: list[dict[str, Any]], call: str) -> None:
    for seen in exchanged:
        assert "No strategy of dtrain's connects the 2 processes of this job" in seen[f"{call} too early"]
        assert "dtrain.MultiWorkerMirroredStrategy()" in seen[f"{call} too early"]


def test_broadcast_gives_the_chiefs_value_of_any_type(exchanged: list[dict[str, Any]]) -> None:
    for seen in exchanged:
        text, number, nothing, nested, array, large = seen["broadcast"]
        assert (text, number, nothing, nested) == ("text of 0", 0, None, [0, {"nested": (0, 0.5)}])
        np.testing.assert_array_equal(array, np.zeros((2, 3), "float32"))
        assert array.dtype == np.float32
        assert large == b"\x00" * 300_000
        assert seen["not pickled"] == "chief's"
        assert seen["order"] == list(range(20))


def test_a_barrier_waits_for_the_last(exchanged: list[dict[str, Any]]) -> None:
    assert exchanged[1]["past the barrier alone"] is False


def test_a_worker_that_does_not_come_in_time(exchanged: list[dict[str, Any]]) -> None:
    name, text = exchanged[0]["timeout"]
    assert name == "PeerMissingError"
    assert "Worker 1 did not reach this point within 1 s" in text
    assert "must be called by every worker" in text
    assert [seen["after"] for seen in exchanged] == ["again", "again"]


def test_a_worker_that_fails_ends_the_others_that_wait_for_it(tmp_path: Path) -> None:
    """It does not tell them that it has ended its program: they could fail because of that, and before it."""
    operations = tmp_path / "operations"

    def fails() -> None:
        from dtrain.process_group import peers

        dtrain.strategy()
        if dtrain.rank() == 1:
            # What it would tell the first worker from now on.
            vars(peers.connected())["begin"] = operations.write_text
            raise ValueError("on purpose")
        dtrain.barrier()

    with pytest.raises(TaskFailedError, match="on purpose") as caught:
        dtrain.spawn(fails, timeout=LIMIT)
    assert caught.value.task == "worker 1"
    assert not operations.exists()
