"""Deterministic operations in jobs: of two workers, whose graphs measure their waiting, and of servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtrain


def on_workers() -> tuple[list[Any], list[Any], list[str], list[str]]:
    """What a worker computes without and with deterministic operations, and what it could not measure."""
    import keras
    import tensorflow as tf

    strategy = dtrain.MultiWorkerMirroredStrategy(communication="ring")
    x = np.random.default_rng(0).normal(size=(70, 4)).astype("float32")
    numbers, unmeasured = [], []
    for deterministic in (False, True):
        if deterministic:
            tf.config.experimental.enable_op_determinism()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse", metrics=["mae"])
        history = model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
        numbers.append([history.history, model.evaluate(x, x[:, :1], verbose=0)])
        unmeasured.append(history.time_report[-1]["unmeasured"])
    return numbers[0], numbers[1], unmeasured[0], unmeasured[1]


def test_two_workers_compute_the_same_bits() -> None:
    for usual, deterministic, first, second in dtrain.spawn(on_workers, workers=2, devices_per_worker=2):
        assert usual == deterministic
        assert (first, second) == ([], ["input", "communication"])


SERVERS = """
import json, sys
import keras, numpy as np, tensorflow as tf, dtrain
tf.config.experimental.enable_op_determinism()
strategy = dtrain.ParameterServerStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
history = model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0)
model.evaluate(x, x[:, :1], verbose=0)
found = {"losses": history.history["loss"], "unmeasured": history.time_report[-1]["unmeasured"]}
open(sys.argv[1], "w").write(json.dumps(found))
"""


@pytest.mark.long
def test_workers_of_servers_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SERVERS)
    report = tmp_path / "report.json"
    job = [sys.executable, "-m", "dtrain", "launch", "--workers", "1", "--ps", "1"]
    subprocess.run([*job, str(tmp_path / "train.py"), str(report)], check=True, timeout=300)
    results = json.loads(report.read_text())
    assert results["losses"] == sorted(results["losses"], reverse=True) and len(results["losses"]) == 3
    assert results["unmeasured"] == ["communication"]
