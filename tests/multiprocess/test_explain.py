"""`dtrain explain`: what the replicas of a script's step communicate, with the script's lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import dtrain, keras, numpy as np, tensorflow as tf

class Ranked(keras.layers.Layer):
    def call(self, x):
        return x + tf.cast(tf.size(tf.unique(tf.round(x[:, 0]))[0]), x.dtype)  # LINE 6

with dtrain.strategy("auto").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Ranked(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
model.fit(x, x[:, :1], batch_size=16, verbose=0)
print("the script went on")
"""


def explain(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(program)
    command = [sys.executable, "-m", "dtrain", "explain", *options, "script.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_the_plan_of_two_workers(tmp_path: Path) -> None:
    done = explain(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "under MultiWorkerMirroredStrategy, 2 replicas, a batch of 16 rows" in done.stdout
    assert "1 gather of 64 bytes" in done.stdout
    assert "the script went on" not in done.stdout
    gathers = [line for line in done.stdout.splitlines() if " gather " in line and "Unique" in line]
    assert gathers and all("script.py:6" in line for line in gathers)
    assert any("script.py:12" in line and " sum " in line for line in done.stdout.splitlines())


@pytest.mark.long
def test_the_plan_of_three_devices_as_json(tmp_path: Path) -> None:
    done = explain(tmp_path, SCRIPT, "--workers", "1", "--devices-per-worker", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)
    assert (plan["strategy"], plan["replicas"], plan["gathers"]) == ("MirroredStrategy", 3, 1)
    assert [operation["operation"] for operation in plan["gathered"]] == ["Unique"]
    # The gradients, and the loss, which is known a round later than the total that it is added to.
    assert plan["sum_bytes"] == 4 * (4 * 3 + 3 + 3 * 1 + 1) + 4


@pytest.mark.long
def test_a_step_that_is_not_divided(tmp_path: Path) -> None:
    done = explain(tmp_path, SCRIPT, "--workers", "1")
    assert done.returncode == 2
    assert "The step is not divided: it runs under" in done.stderr and "1 replica" in done.stderr


@pytest.mark.long
def test_a_script_that_fails(tmp_path: Path) -> None:
    done = explain(tmp_path, "raise ValueError('not well')\n")
    assert done.returncode == 1 and done.stdout == ""
    assert "not well" in done.stderr and "script.py:1" in done.stderr
