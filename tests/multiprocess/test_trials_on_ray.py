"""The program of docs/keras_tuner.md whose trials are tasks of Ray; a trial, a node and the program die.

What KerasTuner does in one job is `tests/multidevice/test_guide.py`'s to show.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import guide
from processes import wait_until
from ray_nodes import ENVIRONMENT, MARK, RayNode, needs_ray, ray_node

pytestmark = [
    needs_ray,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("keras_tuner") is None, reason="KerasTuner is not installed"),
]

LIMIT = 200.0
NAME = "tune_on_ray.py"
# A trial of the search without Ray: its metrics of each epoch.
ALONE = """
import json, sys
import keras_tuner
import tune_on_ray
from keras_tuner.engine.trial import Trial
tuner = keras_tuner.RandomSearch(tune_on_ray.build, "val_accuracy", directory="alone")
print(json.dumps(tune_on_ray.run(tuner, Trial.load(sys.argv[1]))))
"""


@contextlib.contextmanager
def program(node: RayNode, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The page's program by its command, in this folder and on this cluster."""
    text = (guide.DOCS / "keras_tuner.md").read_text(encoding="utf-8")
    (block,) = (file for file in guide.files(text) if file.title == NAME)
    (command,) = (words for words in guide.commands(text) if words[-1] == NAME)
    (folder / NAME).write_text(block.text, encoding="utf-8")
    env = os.environ | ENVIRONMENT | {"RAY_ADDRESS": node.address, MARK: node.mark}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command[1:]], cwd=folder, env=env, **pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def tasks(node: RayNode) -> list[psutil.Process]:
    """The processes of this node that run a trial."""
    processes = []
    for process in node.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::run"):
                processes.append(process)
    return processes


def state(folder: Path, name: str) -> dict[str, Any]:
    """What KerasTuner has written about the search, or about a trial."""
    return dict(json.loads((folder / "tuning" / "digits" / f"{name}.json").read_text()))


def end(process: subprocess.Popen[str], folder: Path) -> str:
    """Waits for the program's end: all trials are completed, and it has printed the best one.

    Returns:
        The number of the one trial that was run twice.
    """
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    trials = [state(folder, f"trial_{number}/trial") for number in range(4)]
    assert {trial["status"] for trial in trials} == {"COMPLETED"}, errors
    best = max(trials, key=lambda trial: trial["score"])
    (line,) = (text for text in output.splitlines() if text.startswith("{'units'"))
    values, _, accuracy = line.rpartition(" ")
    assert values == str(best["hyperparameters"]["values"])
    assert float(accuracy) == pytest.approx(best["score"], abs=1e-6)
    runs = state(folder, "oracle")["run_times"]
    assert sorted(runs.values()) == [1, 1, 1, 2], errors
    return str(max(runs, key=runs.get))


@pytest.mark.usefixtures("as_installed")
def test_trials_run_at_the_same_time_and_one_that_dies_is_run_again(tmp_path: Path) -> None:
    with ray_node(cpus=2) as node, program(node, tmp_path) as process:
        wait_until(lambda: len(tasks(node)) == 2 or process.poll() is not None, LIMIT)
        tasks(node)[0].kill()
        number = end(process, tmp_path)
    command = [sys.executable, "-c", ALONE, f"tuning/digits/trial_{number}/trial.json"]
    env = os.environ | ENVIRONMENT | {"TF_NUM_INTRAOP_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, check=True, stdout=subprocess.PIPE, text=True)
    epochs = json.loads(done.stdout.splitlines()[-1])
    assert len(epochs) == 2
    by_name = state(tmp_path, f"trial_{number}/trial")["metrics"]["metrics"]
    for name, tracked in by_name.items():
        (values,) = zip(*(observation["value"] for observation in tracked["observations"]), strict=True)
        assert values == pytest.approx([metrics[name] for metrics in epochs], abs=1e-6), name


@pytest.mark.soak("the test above has a trial that dies; here its node dies, and before it the program")
def test_a_search_resumes_when_the_program_was_killed_and_goes_on_without_a_lost_node(tmp_path: Path) -> None:
    def second_trial_runs() -> bool:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return len(state(tmp_path, "oracle")["start_order"]) == 2
        return False

    with ray_node(cpus=1) as head:
        with program(head, tmp_path) as process:
            wait_until(lambda: second_trial_runs() or process.poll() is not None, LIMIT)
        first = (tmp_path / "tuning/digits/trial_0/trial.json").stat().st_mtime_ns
        wait_until(lambda: not tasks(head), LIMIT)
        with ray_node(cpus=1, join=head) as second, program(head, tmp_path) as process:
            wait_until(lambda: bool(tasks(head) and tasks(second)) or process.poll() is not None, LIMIT)
            second.kill()
            end(process, tmp_path)
    assert (tmp_path / "tuning/digits/trial_0/trial.json").stat().st_mtime_ns == first
