"""The recipes on small archives in the published formats: that they learn, alike, and what they leave."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipe_runs import Run, start
from small_archives import write_cifar10, write_csv, write_imdb

# What runs under which strategy beside one device; the rest of the grid is with the long tests.
HERE = ["cifar10:mirrored", "text-csv:central_storage"]
WORKERS = ["imdb:multi_worker"]
TIME_LIMIT = 200

LOADS_WITHOUT_DTRAIN = """
import json, sys
import keras, numpy as np, tensorflow as tf
model = keras.models.load_model(sys.argv[1])
texts = tf.constant(["the film was moving and brilliant, fresh", "a dull and clumsy plot, endless", ""])
result = model.evaluate(texts[:2], np.array([1, 0]), verbose=0, return_dict=True)
assert "dtrain" not in sys.modules
print(json.dumps({"outputs": model.predict(texts, verbose=0).tolist(), **result}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and the directories of all runs: two processes' work."""
    folder = tmp_path_factory.mktemp("recipes")
    data = folder / "data"
    data.mkdir()
    write_cifar10(data)
    write_imdb(data, each=40)
    write_csv(data, count=120)
    alone = sorted({task.partition(":")[0] for task in HERE + WORKERS})
    start(folder, [f"{name}:default" for name in alone] + HERE)
    start(folder, WORKERS, "--workers", "2")
    return folder


def run_of(folder: Path, task: str) -> Run:
    return Run(folder / task.replace(":", "-"))


@pytest.mark.timeout(2 * TIME_LIMIT + 60)
@pytest.mark.parametrize("task", HERE + WORKERS)
def test_a_recipe_learns_one_devices_numbers(folder: Path, task: str) -> None:
    name, _, strategy = task.partition(":")
    trained, expected = run_of(folder, task), run_of(folder, f"{name}:default")
    assert all(math.isfinite(loss) for loss in trained.losses)
    assert trained.losses[-1] < trained.losses[0]
    assert trained.losses == pytest.approx(expected.losses, rel=2e-4)
    tested = [run.record["final_metrics"]["test_loss"] for run in (trained, expected)]
    assert tested[0] == pytest.approx(tested[1], rel=2e-4)
    assert (trained.record["status"], trained.record["strategy"]) == ("finished", strategy)


@pytest.mark.timeout(2 * TIME_LIMIT + 60)
def test_the_record_tells_the_sizes_and_rates(folder: Path) -> None:
    record = run_of(folder, "cifar10:mirrored").record
    sizes = {name: record[name] for name in ("global_batch", "micro_batch", "accumulation", "model")}
    assert sizes == {"global_batch": 32, "micro_batch": 16, "accumulation": 2, "model": "small"}
    assert record["highest_learning_rate"] == pytest.approx(1e-3 * math.sqrt(2))


@pytest.mark.timeout(2 * TIME_LIMIT + 60)
def test_a_model_of_texts_takes_texts_without_dtrain(folder: Path) -> None:
    path = run_of(folder, "imdb:multi_worker").path
    words = (path / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    assert words[:2] == ["", "[UNK]"] and {"brilliant", "dull"} <= set(words)
    done = subprocess.run(
        [sys.executable, "-c", LOADS_WITHOUT_DTRAIN, str(path / "model.keras")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert np.isfinite(report["outputs"]).all() and np.shape(report["outputs"]) == (3, 2)
    assert report["accuracy"] == 1.0
    classes = (run_of(folder, "text-csv:default").path / "classes.txt").read_text(encoding="utf-8")
    assert classes == "0\n1\n"


@pytest.mark.timeout(120)
def test_missing_data_is_said_where_the_recipe_runs_here(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", "train", "imdb", "--strategy", "default", "--data", "nowhere"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "dtrain: error: IMDb was not found" in done.stderr and "Hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
