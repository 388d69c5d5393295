"""The goodput of real jobs whose chief is killed at a named step: their `run.json` accounts for all time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.monitor.goodput import KINDS
from dtrain.monitor.line_files import read_events

# The chief dies in its callback of step 7, as soon as the checkpoint of step 5 is complete.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

import keras
import numpy as np

import dtrain

name, run, backup = sys.argv[1], "run", Path("backup")
hook = {"gradient_hook": dtrain.DiLoCo(every=5)} if name == "diloco" else {}
strategy = dtrain.strategy("multi_worker" if hook else name, **hook)

class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if os.environ["DTRAIN_ATTEMPT"] == "0" and dtrain.is_chief():
            time.sleep(1.05)  # wall clock: lines about steps are written a second apart
            while batch == 6 and not list(backup.rglob("COMMITTED.json")):
                time.sleep(0.05)
            if batch == 6:
                os.kill(os.getpid(), signal.SIGKILL)

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
rows = np.ones((100, 4), "float32")
model.fit(
    rows, rows[:, :1], batch_size=10, epochs=2, validation_data=(rows, rows[:, :1]), verbose=0,
    callbacks=[dtrain.monitor.Monitor(run), dtrain.BackupAndRestore(backup, save_freq=5), Dies()],
)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("multi_worker", ["--workers", "2"]),
        pytest.param("diloco", ["--workers", "2"], marks=pytest.mark.long),
        pytest.param("mirrored", ["--workers", "1"], marks=pytest.mark.long),
        pytest.param("parameter_server", ["--workers", "1", "--ps", "1"], marks=pytest.mark.long),
    ],
)
def test_the_kinds_of_a_killed_jobs_time_sum_to_its_wall_time(
    name: str, tasks: list[str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "dtrain", "launch", *tasks, "--spares", "0", "--max-restarts", "1"]
    began = time.time()
    done = subprocess.run(
        [*command, "job.py", name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    took = time.time() - began
    assert done.returncode == 0, done.stderr
    goodput = json.loads((tmp_path / "run" / "run.json").read_text())["goodput"]
    assert (goodput["steps"], goodput["repeated_steps"], goodput["attempts"]) == (20, 2, 2), goodput
    seconds = goodput["seconds"]
    assert list(seconds) == list(KINDS)
    assert sum(seconds.values()) == pytest.approx(goodput["wall_seconds"], abs=1e-6)
    lines = list(read_events(tmp_path / "run" / "events.jsonl"))
    wall = lines[-1]["time"] - lines[0]["job_began"]
    assert wall == pytest.approx(goodput["wall_seconds"], abs=0.5)
    assert goodput["wall_seconds"] < took
    # A restart may take less than the hundredth of a second to which a process' start is known.
    assert min(seconds.values()) >= 0
    for kind in ("productive", "start", "tracing", "checkpoint", "restore", "repeated", "validation"):
        assert seconds[kind] > 0, (kind, seconds)
    assert seconds["repeated"] >= 1.05  # the callback of step 7 never ended
    assert seconds["callbacks"] >= 6 * 1.05
