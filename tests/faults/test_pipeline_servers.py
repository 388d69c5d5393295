"""A pipeline under parameter servers: the chief reads it, and one worker gives one device's numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import keras, numpy as np, tensorflow as tf
import dtrain
from dtrain.data import Pipeline, record_features, tfrecords, write_tfrecords

x, y = np.random.default_rng(0).normal(size=(37, 4)).astype("float32"), np.arange(37)


def noisy(example, seed):
    return example[0] + tf.random.stateless_normal([4], seed, stddev=0.1), example[1] / 37


def train(strategy, pipeline):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(pipeline.dataset(), epochs=2, verbose=0).history
    return [history["loss"], history["mae"], *(w.ravel().tolist() for w in model.get_weights())]


if __name__ == "__main__":
    strategy = dtrain.ParameterServerStrategy()
    files = tfrecords(write_tfrecords((x, y), "data-*.tfrecord", 3), record_features((x, y)))
    sources = {
        "arrays": lambda: Pipeline((x, y), batch=8, augment=noisy),
        "files": lambda: Pipeline(
            files, batch=8, transform=lambda example: (example["0"], example["1"]), augment=noisy
        ),
    }
    found = {
        name: [train(each, make()) for each in (strategy, tf.distribute.get_strategy())]
        for name, make in sources.items()
    }
    with open(sys.argv[1], "w") as report:
        json.dump(found, report)
"""


@pytest.mark.timeout(200)
def test_the_chief_reads_the_pipeline(tmp_path: Path) -> None:
    script, out = tmp_path / "program.py", tmp_path / "report.json"
    script.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "1", "--ps", "1", str(script), str(out)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=180, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for values, expected in json.loads(out.read_text(encoding="utf-8")).values():
        for one, other in zip(values, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
