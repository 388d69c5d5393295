"""How the GPUs of a machine are divided among the workers there, and `--gpus-per-worker` on a machine."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain import cli
from dtrain.environments.gpu_shares import ALL, gpu_shares
from dtrain.errors import ConfigurationError

FOUR = ["0", "1", "GPU-8a", "3"]


@pytest.mark.parametrize(
    ("gpus", "workers", "each", "shares"),
    [
        (FOUR, None, None, FOUR),
        (FOUR, 2, None, ["0", "1"]),
        (FOUR[:2], 3, None, ["0", "1", "0"]),
        (FOUR, None, 2, ["0,1", "GPU-8a,3"]),
        (FOUR[:3], None, 2, ["0,1"]),
        (FOUR, 1, 3, ["0,1,GPU-8a"]),
        (FOUR, None, ALL, []),
        (FOUR, 1, ALL, []),
        ([], None, None, []),
        ([], 3, None, []),
        ([], None, ALL, []),
    ],
)
def test_shares(gpus: list[str], workers: int | None, each: int | None, shares: list[str]) -> None:
    assert gpu_shares(gpus, workers, each) == shares


@pytest.mark.parametrize(
    ("gpus", "workers", "each", "said"),
    [
        (FOUR, 3, 2, "--gpus-per-worker is 2, and host2 has 4 GPUs for 3 workers"),
        (FOUR, None, 5, "has 4 GPUs for 1 worker"),
        ([], None, 1, "has 0 GPUs for 1 worker"),
        (FOUR, 2, ALL, "--gpus-per-worker is all, and host2 has 2 workers"),
    ],
)
def test_shares_that_cannot_be(gpus: list[str], workers: int | None, each: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        gpu_shares(gpus, workers, each, where="host2")


@pytest.mark.parametrize(
    ("options", "workers", "gpus"),
    [
        ([], 4, FOUR),
        (["--gpus-per-worker", "2"], 2, ["0,1", "GPU-8a,3"]),
        (["--gpus-per-worker", "all"], 1, []),
        (["-n", "2"], 2, ["0", "1"]),
        (["-n", "1:2", "--gpus-per-worker", "2"], 2, ["0,1", "GPU-8a,3"]),
        (["--nnodes", "3", "--node-rank", "0", "--gpus-per-worker", "2"], 6, ["0,1", "GPU-8a,3"]),
        (["--nnodes", "3", "--node-rank", "0", "--gpus-per-worker", "all"], 3, []),
        (["--nnodes", "3", "--node-rank", "0", "--nproc-per-node", "2"], 6, ["0", "1"]),
        (["--hosts", "a:2,b:1", "--gpus-per-worker", "2"], 3, 2),
    ],
)
def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, options: list[str], workers: int, gpus: object
) -> None:
    given: dict[str, Any] = {}

    def launched(command: list[str], **said: Any) -> int:
        given.update(said)
        return 0

    monkeypatch.setattr("dtrain.environments.gpus.visible_gpus", lambda: FOUR)
    monkeypatch.setattr("dtrain.launch.launch_local", launched)
    place = ["--rendezvous", "localhost:4000"] if "--nnodes" in options else []
    assert cli.main(["launch", *options, *place, "-m", "this"]) == 0
    assert given["workers"] == workers
    if "nodes" in given:
        assert given["nodes"].gpus == gpus and given["nodes"].per_node == workers // 3
    else:
        assert (given["hosts"].gpus_per_worker if "hosts" in given else given["gpus"]) == gpus


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ps", "1"], "--gpus-per-worker is for jobs without parameter servers"),
        (["-n", "2"], "this machine has 0 GPUs for 2 workers"),
        (["-n", "2", "--gpus-per-worker", "all"], "this machine has 2 workers"),
        (["--gpus-per-worker", "0"], "'0' is not an integer of at least 1"),
        (["--nnodes", "1", "--node-rank", "0", "--rendezvous", "localhost:4000"], "this node has 0 GPUs"),
    ],
)
def test_what_cannot_be_divided(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    each = [] if "--gpus-per-worker" in options else ["--gpus-per-worker", "1"]
    assert cli.main(["launch", *each, *options, "-m", "this"]) == 2
    assert said in capsys.readouterr().err
