"""`dtrain doctor`: the installation, and what of a script cannot run on a TPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Findings = dict[str, list[dict[str, str]]]

# Each part of the step and of the data has another fault.
FAULTY = """
import keras, numpy as np, tensorflow as tf
import dtrain

class Step(keras.Model):
    def train_step(self, data):
        x, y = data
        tf.py_function(lambda value: None, [x], [])  # LINE py_function
        kept = tf.boolean_mask(x, x[:, 0] > 0.5)  # LINE boolean_mask
        found = tf.size(tf.unique(tf.cast(x[:, 1], tf.int64))[0])  # LINE unique
        loss = super().train_step(data)
        return {**loss, "kept": tf.reduce_sum(kept), "found": found}

class Words(keras.layers.Layer):
    def __init__(self, **more):
        super().__init__(**more)
        words = tf.lookup.KeyValueTensorInitializer(["3", "4"], [1.0, 2.0])
        self.table = tf.lookup.StaticHashTable(words, 0.0)

    def call(self, x):
        return x + self.table.lookup(tf.strings.as_string(tf.cast(x, tf.int32)))  # LINE lookup

with dtrain.TPUStrategy(tpu="local").scope():
    inputs = keras.Input((3,))
    model = Step(inputs, keras.layers.Dense(1)(Words(name="words")(inputs)))
    model.compile("adam", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((20, 3), "float32"), np.ones((20, 1), "float32")))
model.fit(data.batch(8), validation_data=data.batch(4, drop_remainder=True), epochs=3)
raise SystemExit("it has trained")
"""
SOUND = """
import keras, numpy as np, tensorflow as tf
import dtrain

with dtrain.strategy("mirrored").scope():
    words = keras.Input((6,), dtype="int64")
    image = keras.Input((8, 8, 1))
    h = keras.layers.Embedding(50, 8)(words)
    h = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(h, h) + h
    h = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(h))
    c = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, activation="relu")(image))
    c = keras.layers.Flatten()(keras.layers.MaxPooling2D()(c))
    both = keras.layers.Dropout(0.2)(keras.layers.Concatenate()([h, c]))
    model = keras.Model([words, image], keras.layers.Dense(3)(both))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
x = [np.ones((16, 6), "int64"), np.ones((16, 8, 8, 1), "float32")]
try:
    model.fit(x, np.zeros(16, "int64"), batch_size=4, validation_split=0.25)
except SystemExit as end:  # as a command does that makes an exit status of its own
    print(end.code)
"""


def doctor(folder: Path, program: str) -> tuple[int, Findings]:
    """Runs the command on a script in a folder; its exit status, and the findings by their check."""
    (folder / "script.py").write_text(program)
    return findings_of(["--tpu-ready", "--json", "script.py"], cwd=folder)


def findings_of(arguments: list[str], **options: Any) -> tuple[int, Findings]:
    """Runs the command with options of `subprocess.run`; its exit status, and the findings by their check."""
    command = [sys.executable, "-m", "dtrain", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.stdout, done.stderr
    findings: Findings = {}
    for entry in json.loads(done.stdout)["findings"]:
        assert bool(entry["remedy"]) == (entry["status"] != "ok"), entry
        findings.setdefault(entry["check"], []).append(entry)
    return done.returncode, findings


def line(program: str, mark: str) -> str:
    """How the line of a program with this mark is named."""
    number = next(i for i, text in enumerate(program.splitlines(), 1) if f"# LINE {mark}" in text)
    return f"script.py:{number}"


@pytest.mark.long
def test_what_a_tpu_refuses_is_named_with_its_place(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, FAULTY)
    assert status == 1
    (data,) = findings["train data"]
    assert "8 examples" in data["found"] and "batch 2 (the last one) has 4" in data["found"]
    problems = {entry["found"] for entry in findings["train step"]}
    for mark, words in {
        "py_function": "calls Python on the host",
        "boolean_mask": "depends on values",
        "unique": "depends on values",
        "lookup": "in the layer 'words'",
    }.items():
        place = line(FAULTY, mark)
        assert [problem for problem in problems if words in problem and place in problem], (
            place,
            words,
            problems,
        )
    assert len(problems) == 4, problems
    (tested,) = findings["test step"]
    assert "'words'" in tested["found"] and "test data" not in findings


@pytest.mark.long
def test_a_step_that_a_tpu_can_run(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, SOUND)
    assert status == 0, findings
    assert "this was not tried on a TPU" in findings["train step"][0]["found"]
    assert "this was not tried on a TPU" in findings["test step"][0]["found"]


@pytest.mark.parametrize("kind", [["doctor", "--tpu-ready"], ["explain"]])
def test_a_script_that_is_not_there(kind: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dtrain", *kind, "missing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "There is no script 'missing.py'" in done.stderr


@pytest.mark.long
def test_modules_that_each_process_compiles_again(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    _, findings = findings_of(["--json"], env=environment)
    assert [entry["status"] for entry in findings["TensorFlow"]] == ["ok", "warn"]
    assert "PYTHONDONTWRITEBYTECODE=" in findings["TensorFlow"][1]["remedy"]
    del environment["PYTHONDONTWRITEBYTECODE"]
    _, findings = findings_of(["--json"], env=environment)
    assert [entry["status"] for entry in findings["TensorFlow"]] == ["ok"]
