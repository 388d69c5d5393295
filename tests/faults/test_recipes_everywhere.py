"""Every recipe, with each of its models, under every strategy, on small archives in the published formats."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipe_runs import TASKS, Run, start
from small_archives import write_cifar10, write_csv, write_imdb

HERE = ("default", "mirrored", "central_storage")
STRATEGIES = (*HERE, "multi_worker", "parameter_server")
TIME_LIMIT = 600
# Dropout differs by replica, and 16 bits round by the size of a replica's part: these only learn.
OTHER_NUMBERS = ("synthetic-cnn", "text-csv-transformer")
# What differs by rounding in an epoch is enlarged in the next, most where BatchNorm divides by small numbers.
ENLARGING = {"cifar10-resnet": 2e-2, "digits": 3e-3}

pytestmark = [
    pytest.mark.timeout(3 * TIME_LIMIT + 60),
    pytest.mark.soak("test_recipes.py runs one recipe of each kind"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and the directories of all runs: one process here, and two jobs."""
    folder = tmp_path_factory.mktemp("recipes")
    data = folder / "data"
    data.mkdir()
    write_cifar10(data)
    write_imdb(data, each=40)
    write_csv(data, count=120)
    start(folder, [f"{name}:{strategy}" for strategy in HERE for name in TASKS], timeout=TIME_LIMIT)
    start(folder, [f"{name}:multi_worker" for name in TASKS], "--workers", "2", timeout=TIME_LIMIT)
    servers = ("--workers", "2", "--ps", "1", "--max-restarts", "0")
    start(folder, [f"{name}:parameter_server" for name in TASKS], *servers, timeout=TIME_LIMIT)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TASKS)
def test_it_learns(folder: Path, name: str, strategy: str) -> None:
    run = Run(folder / f"{name}-{strategy}")
    assert len(run.losses) == 2
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.losses[1] < run.losses[0]
    assert run.record["status"] == "finished"
    assert all(math.isfinite(value) for value in run.record["final_metrics"].values())


@pytest.mark.parametrize("strategy", STRATEGIES[1:-1])
@pytest.mark.parametrize("name", [name for name in TASKS if name not in OTHER_NUMBERS])
def test_it_learns_one_devices_numbers(folder: Path, name: str, strategy: str) -> None:
    losses, expected = (Run(folder / f"{name}-{way}").losses for way in (strategy, "default"))
    assert losses[0] == pytest.approx(expected[0], rel=2e-4)
    assert losses[1] == pytest.approx(expected[1], rel=ENLARGING.get(name, 2e-4))
