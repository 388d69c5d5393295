"""What a bench plans to run, on machines of several kinds, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.bench import output
from dtrain.bench.bench_plan import MODELS, ONE_CORE, BenchOptions, Row, rows_of
from dtrain.errors import ConfigurationError
from dtrain.recipes.catalogue import RECIPES
from dtrain.strategies.machine import Machine
from dtrain.strategies.registry import STRATEGIES
from refusals import refused


def machine(cores: int = 2, **more: Any) -> Machine:
    return Machine(processor="a processor", cores=tuple(range(cores)), **more)


def rows(found: Machine, **asked: Any) -> dict[str, Row]:
    return {row.key: row for row in rows_of(BenchOptions(**asked), found)}


def test_all_strategies_have_a_row_on_two_cores() -> None:
    found = rows(machine())
    assert {row.strategy for row in found.values()} == set(STRATEGIES)
    absent = {key for key, row in found.items() if row.absent}
    assert absent == {"multi_worker_nccl", "fully_sharded_nccl", "tpu"}
    assert "TPU_NAME" in found["tpu"].absent
    assert "GPU" in found["multi_worker_nccl"].absent
    assert next(iter(found)) == ONE_CORE


def test_each_worker_has_a_core_of_its_own() -> None:
    found = rows(machine(4), workers=3)
    assert found["multi_worker_ring"].binding == "cores-each=0,1,2"
    assert found["multi_worker_ring"].own_core
    assert (
        found["parameter_server"].binding == "cores-each=0,1,2,3"
    )  # the chief and the server have all of them
    assert found["mirrored"].binding == "cores=0,1"
    assert found["one_device"].binding == found["default"].binding == "cores=0,1,2,3"
    assert found[ONE_CORE].binding == "cores=0"
    assert not found["one_device"].own_core  # one replica on four cores has no efficiency


def test_more_workers_than_cores_share_them() -> None:
    found = rows(machine(2), workers=3, devices=4)
    for key in ("multi_worker_ring", "parameter_server", "mirrored"):
        assert (found[key].binding, found[key].own_core) == ("cores=0,1", False), key


def test_one_core_is_one_base() -> None:
    found = rows(machine(1))
    assert ONE_CORE not in found
    assert found["one_device"].binding == "cores=0"


def test_what_is_missing_is_said() -> None:
    found = rows(machine(mpi_problem="no mpi4py", servers_problem="no ports"), devices=1)
    assert "no ports" in found["multi_worker_ring"].absent
    assert "no ports" in found["parameter_server"].absent
    assert "--devices" in found["mirrored"].absent
    assert rows(machine(mpi_problem="no mpi4py"))["multi_worker_mpi"].absent == "no mpi4py"


def test_gpus_are_dealt_out_in_the_place_of_cores() -> None:
    found = rows(machine(8, gpus=("GPU:0", "GPU:1")), workers=2, devices=8)
    assert found["one_device"].binding == "gpus=0"
    assert (found["mirrored"].binding, found["mirrored"].replicas) == ("gpus=0,1", 2)
    assert found["multi_worker_nccl"].binding == "gpus-each=0,1"
    assert "NCCL" in found["multi_worker_ring"].absent
    assert ONE_CORE not in found
    too_few = rows(machine(8, gpus=("GPU:0",)), workers=2)
    assert "2 workers need one GPU each" in too_few["multi_worker_nccl"].absent
    assert "one GPU" in too_few["mirrored"].absent


def test_one_device_is_always_there_to_compare_with() -> None:
    assert set(rows(machine(), strategies="MultiWorkerMirroredStrategy,ps")) == {
        ONE_CORE,
        "one_device",
        "multi_worker_ring",
        "multi_worker_mpi",
        "multi_worker_nccl",
        "parameter_server",
    }
    assert set(rows(machine(), strategies="multi_worker", transports="ring")) == {
        ONE_CORE,
        "one_device",
        "multi_worker_ring",
    }
    assert set(rows(machine(), strategies="default")) == {"one_device", "default"}


def test_every_command_is_one_that_its_recipe_takes() -> None:
    for name, model in MODELS.items():
        asked = BenchOptions(model=name, seed=3)
        for row in rows_of(asked, machine()):
            command = row.command(asked, Path("out"))
            at = command.index("train")
            own = [each for each in command[at + 2 :] if each != "--devices"]
            if "--devices" in command:
                own.remove(str(row.replicas))
            options = RECIPES[model.recipe].options.parse(own)
            assert (options.epochs, options.seed, options.run_dir) == (model.epochs, 3, "out")
            assert ("launch" in command) == bool(row.workers)
            assert ("--mpi" in command) == (row.transport == "mpi")


def test_the_digits_are_as_many_as_the_plan_says() -> None:
    from dtrain.data import load_digits

    assert len(load_digits().train.labels) == MODELS["digits"].examples


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategies", "mirored"], ["There is no strategy 'mirored'", "'mirrored'"]),
        (
            ["--strategies", "auto"],
            ["'auto', which stands for one of the other strategies", "dtrain strategies"],
        ),
        (["--strategies", ","], ["The strategies are ',': none"]),
        (["--transports", "rings"], ["The transport 'rings'", "Did you mean 'ring'?", "nccl"]),
        (["--model", "digit"], ["The model 'digit'", "Did you mean 'digits'?", "synthetic-cnn"]),
        (["--workers", "0"], ["--workers", "The number of workers is 0, which is below 1"]),
        (["--ps", "0"], ["--ps", "parameter servers is 0"]),
        (["--devices", "x"], ["--devices", "'x'"]),
        (["--rounds", "0"], ["--rounds", "is 0"]),
        (["--epochs", "1"], ["The number of epochs is 1", "the first one is not measured"]),
        (["--global-batch", "1"], ["The global batch is 1, but there are 2 replicas"]),
        (["--seed", "-1"], ["The seed is -1"]),
        (["--size", "100"], ["The size is 100", "data of its own", "synthetic-cnn or synthetic-transformer"]),
        (["--model", "synthetic-cnn", "--size", "2"], ["The size is 2"]),
        (["--time-limit", "0"], ["--time-limit", "'0' is not a positive number"]),
        (["--output", "full"], ["holds another bench", "Choose another directory"]),
        (["--output", "full/bench.json"], ["is a file"]),
        (["--output", "used"], ["but it holds files"]),
        (["--strategy", "mirrored"], ["--strategy"]),
    ],
)
def test_bad_input_is_said_at_once(
    arguments: list[str],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("full", "used"):
        (tmp_path / folder).mkdir()
    (tmp_path / "full" / "bench.json").write_text("{}")
    (tmp_path / "used" / "notes.txt").write_text("mine")
    assert cli.main(["bench", *arguments]) == 2
    shown = capsys.readouterr().err
    for words in said:
        assert words in shown
    assert not (tmp_path / "runs").exists()


def test_a_task_of_a_job_starts_no_bench(tmp_path: Path) -> None:
    config = '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}'
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", "bench"],
        env={**os.environ, "TF_CONFIG": config},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "This process is worker 0 of a job" in done.stderr
    assert not list(tmp_path.iterdir())


def test_two_benches_do_not_share_a_directory(tmp_path: Path) -> None:
    """The second one looked at the directory while it was still empty."""
    asked = str(tmp_path / "both")
    for _ in range(2):
        output.check_output(asked)
    assert output.open_output(asked) == tmp_path / "both"
    with refused(ConfigurationError, "holds another bench", "Choose another directory"):
        output.open_output(asked)
