"""`dtrain plan script.py`: a real script is measured, and planned by a calibration that is measured, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import dtrain, keras, numpy as np, tensorflow as tf
assert sys.argv[1:] == ["--epochs", "2"] and __name__ == "__main__", sys.argv
strategy = dtrain.MultiWorkerMirroredStrategy(communication="ring")
with strategy.scope():
    layers = keras.layers
    model = keras.Sequential([keras.Input((20,)), layers.Dense(300, "relu"), layers.BatchNormalization(),
                              layers.Dense(2)])
    model.compile("adam", "mse")
x = np.ones((64, 20), "float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(16)
model.fit(data, epochs=2, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint("epoch.keras")])
print("the script went on")
"""
OWN_LOOP = "import dtrain\ndtrain.strategy('auto')\nprint('a loop of my own')\n"
RAISES = "import dtrain\nraise ValueError('not well')\n"


def dtrain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dtrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.long
def test_a_script_is_measured_and_planned_with_a_measured_calibration(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    measured = ("--save-profile", "profile.json", "--json", "script.py", "--epochs", "2")
    done = dtrain(tmp_path, "plan", *measured)
    assert done.returncode == 0, done.stderr
    plan, profile = json.loads(done.stdout), json.loads((tmp_path / "profile.json").read_text())
    assert not (tmp_path / "epoch.keras").exists() and "went on" not in done.stdout
    layers = {layer["name"]: layer for layer in profile["layers"]}
    assert {name: layer["gradients"] for name, layer in layers.items()} == {
        "sequential/dense": [4 * 20 * 300, 4 * 300],
        "sequential/batch_normalization": [4 * 300, 4 * 300],
        "sequential/dense_1": [4 * 300 * 2, 4 * 2],
    }
    assert all(layer["work"] > 0 and layer["activation_bytes"] > 0 for layer in layers.values())
    assert layers["sequential/dense"]["backward_work"] > 0 < layers["sequential/dense_1"]["backward_work"]
    assert [rate["batch"] for rate in profile["rates"]] == [16, 8]
    assert profile["examples_per_epoch"] == 64 and profile["frozen_bytes"] == 2 * 4 * 300
    assert profile["input_examples_per_second"] > 0 and profile["rates"][0]["cores"] > 0
    trained = 4 * (20 * 300 + 3 * 300 + 300 * 2 + 2)
    assert plan["model"]["checkpoint_bytes"] == pytest.approx(3 * trained + 2 * 4 * 300, abs=100)
    assert {one["workers"] for one in plan["predictions"]} == {2}

    done = dtrain(tmp_path, "bench", "--save-calibration", "calibration.json", "--transports", "ring")
    assert done.returncode == 0, done.stderr
    (tmp_path / "cluster.json").write_text(json.dumps(plan["cluster"]))
    given = ("--model", "profile.json", "--cluster", "cluster.json", "--calibration", "calibration.json")
    done = dtrain(tmp_path, "plan", *given, "--json")
    assert done.returncode == 0, done.stderr
    (ring,) = (costs for costs in json.loads(done.stdout)["transports"] if costs["name"] == "ring")
    assert [row["workers"] for row in ring["measured"]] == [2] and ring["measured"][0]["exchange_seconds"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "said"), [(OWN_LOOP, "before enough steps of `fit` were measured"), (RAISES, "script.py:2")]
)
def test_a_script_that_cannot_be_measured_says_why(script: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    done = dtrain(tmp_path, "plan", "script.py")
    assert done.returncode == 2 and said in done.stderr and "Hint: " in done.stderr
