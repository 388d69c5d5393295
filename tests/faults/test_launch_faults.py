"""Training that is started again: with warm spares, and with fewer workers. Real jobs of two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
warm = "tensorflow" in sys.modules
folder, fault = Path(sys.argv[1]), sys.argv[2]
attempt, place = int(os.environ["DTRAIN_ATTEMPT"]), int(os.environ["DTRAIN_PLACE"])
started = folder / f"life-{attempt}-{place}"
started.write_text(json.dumps({"pid": os.getpid(), "warm": warm}))
if fault == "absent" and place == 1 and attempt in (1, 2):
    os.kill(os.getpid(), signal.SIGKILL)

import keras
import numpy as np
import dtrain
from dtrain.launch.local_processes import priority

strategy = dtrain.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dropout(0.2),
                              keras.layers.Dense(1)])
    model.compile("adam", "mse")

def ours():
    return {json.loads(path.read_text())["pid"] for path in folder.glob("life-*")}

def spares():
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    return [p for p in map(int, children)
            if p not in ours() and b"DTRAIN_SPARE=" in Path(f"/proc/{p}/environ").read_bytes()]

def ready(pid):  # a spare that has imported everything closes the pipe over which it says so
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\\0")
    pipe = next(v for v in variables if v.startswith(b"DTRAIN_SPARE=")).rpartition(b":")[2].decode()
    return not Path(f"/proc/{pid}/fd/{pipe}").exists()

def wait_for_spares():  # At their low priority, other tests' processes keep them from it for minutes.
    while len(found := spares()) < 2 or not all(map(ready, found)):
        for spare in found:
            priority.restore(spare, 0, 0)
        time.sleep(0.02)

class Faults(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        first = folder / f"first-{attempt}-{place}"
        if not first.exists():
            first.write_text(str(int(self.model.optimizer.iterations)))
        if attempt < 2 and fault == "warm" and int(self.model.optimizer.iterations) == 20 + 10 * attempt:
            wait_for_spares()
            if place == 1 - attempt:
                os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 0 and fault == "absent" and place == 1 and int(self.model.optimizer.iterations) == 20:
            while not list(folder.glob("backup/**/COMMITTED.json")):
                time.sleep(0.02)  # checkpoints are written beside the training
            os.kill(os.getpid(), signal.SIGKILL)

x = np.random.RandomState(0).rand(480, 16).astype("float32")
y = x.sum(axis=1, keepdims=True)
backup = dtrain.BackupAndRestore(folder / "backup", save_freq=4)
history = model.fit(x, y, batch_size=24, epochs=3, verbose=0, callbacks=[backup, Faults()])
if dtrain.rank() == 0:
    result = {"loss": history.history["loss"], "weights": [w.tolist() for w in model.get_weights()],
              "iterations": int(model.optimizer.iterations), "workers": dtrain.world_size()}
    (folder / "result.json").write_text(json.dumps(result))
"""


def launch(folder: Path, fault: str, *options: str) -> tuple[dict[str, Any], str]:
    folder.mkdir(exist_ok=True)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "dtrain", "launch", "--hang-timeout", "1e6", *options, str(program)]
    done = subprocess.run(
        [*command, str(folder), fault],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", "DTRAIN_REJOIN_SECONDS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "result.json").read_text()), done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    result, _ = launch(folder, "none", "--workers", "2", "--spares", "none")
    return result


def test_warm_spares_take_over(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    result, errors = launch(tmp_path, "warm", "--workers", "2")
    assert result == undisturbed
    for attempt, killed in ((0, 1), (1, 0)):
        for place in (0, 1):
            assert json.loads((tmp_path / f"life-{attempt + 1}-{place}").read_text())["warm"]
        step = 20 + 10 * attempt
        assert f"worker {killed} was killed by signal 9 (SIGKILL) at step {step}" in errors


def test_the_job_goes_on_with_fewer_on_the_same_batches(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    result, errors = launch(tmp_path, "absent", "--workers", "1:2", "--spares", "none")
    assert (result["workers"], result["iterations"]) == (1, undisturbed["iterations"])
    assert len(result["loss"]) == len(undisturbed["loss"])
    assert "It does not start: the absent one (place 1) is tried again after 100 s." in errors
    assert "The job continues with 1 of 2 workers" in errors
    assert int((tmp_path / "first-3-0").read_text()) > 1, "not from the beginning"
