"""`dtrain doctor`: the installation, two steps of a script as a job, and what of it cannot run on a TPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import processes_with, wait_until

Findings = dict[str, list[dict[str, str]]]

TRAIN = """
import pathlib, sys
import dtrain, keras, numpy as np
assert sys.argv[1:] == ["--epochs", "9"] and __name__ == "__main__", sys.argv
with dtrain.strategy("auto").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
x, y = np.ones((64, 4), "float32"), np.ones((64, 2), "float32")
model.fit(x, y, batch_size=8, epochs=9, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint("epoch.keras")])
pathlib.Path("trained").touch()
"""
SHARDED = """
import dtrain, keras, numpy as np, tensorflow as tf
with dtrain.strategy("auto").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
model.fit(data.shard(dtrain.world_size(), dtrain.rank()).batch(4), verbose=0)
"""
RAISES = """
import dtrain, keras
dtrain.strategy("auto")
if dtrain.rank() == 1:
    raise ValueError("the second one is not well")
dtrain.barrier()
"""
OWN_LOOP = """
import signal
print("a loop of my own", flush=True)
signal.pause()
"""
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


def doctor(
    folder: Path, program: str, *options: str, arguments: tuple[str, ...] = ()
) -> tuple[int, Findings]:
    """Runs the command on a script in a folder; its exit status, and the findings by their check."""
    (folder / "script.py").write_text(program)
    return findings_of([*options, "--json", "script.py", *arguments], cwd=folder)


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
def test_two_steps_of_a_job(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, TRAIN, "--job", arguments=("--epochs", "9"))
    assert status == 0, findings
    assert "2 workers made 2 steps" in findings["job"][0]["found"]
    assert findings["strategy"][0]["found"] == "MultiWorkerMirroredStrategy, 2 replicas"
    assert findings["devices"][0]["found"] == "worker 0: CPU:0; worker 1: CPU:0"
    assert "ring" in findings["transport"][0]["found"] and "s a step" in findings["step"][0]["found"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["script.py"]  # the epoch has not ended


@pytest.mark.long
def test_a_task_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, RAISES, "--job")
    assert status == 1
    assert findings["job"][0]["found"] == "worker 1: ValueError: the second one is not well (script.py:5)"


def test_data_that_the_script_divides_by_itself_is_named(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, SHARDED, "--job")
    assert status == 1, findings
    (job,) = findings["job"]
    assert "The workers read other examples" in job["found"] and "the dataset has a shard()" in job["found"]
    assert "give every worker the same data" in job["remedy"]


def test_a_script_without_a_step_is_ended(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, OWN_LOOP, "--job", "--workers", "1", "--time-limit", "3")
    assert status == 1 and "no step was seen within 3 s" in findings["job"][0]["found"]
    assert not processes_with("dtrain.diagnosis.first_steps", str(tmp_path))
    status, findings = doctor(tmp_path, "print('done')", "--job", "--workers", "1")
    assert status == 1 and "ended by itself" in findings["job"][0]["found"]


# The limit is over before the job catches signals, as on a machine that stalls. The job waits for ever.
LATE_JOB = """
import os, signal, threading
from dtrain.diagnosis.script_job import _time_limit

sent, caught = threading.Event(), threading.Event()
kill = os.kill

def send(pid, signum):
    kill(pid, signum)
    sent.set()

os.kill = send
with _time_limit(0.0) as late:
    sent.wait()
    signal.signal(signal.SIGTERM, lambda signum, frame: caught.set())
    caught.wait()
print(late.is_set(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


def test_a_time_limit_that_is_over_before_the_job_catches_signals_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", LATE_JOB], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_a_signal_ends_the_job_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_LOOP + f"# {tmp_path}")
    command = [sys.executable, "-m", "dtrain", "doctor", "--job", str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        wait_until(lambda: len(processes_with("first_steps", str(tmp_path))) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
    assert not processes_with("first_steps", str(tmp_path))


@pytest.mark.long
def test_what_a_tpu_refuses_is_named_with_its_place(tmp_path: Path) -> None:
    status, findings = doctor(tmp_path, FAULTY, "--tpu-ready")
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
    status, findings = doctor(tmp_path, SOUND, "--tpu-ready")
    assert status == 0, findings
    assert "this was not tried on a TPU" in findings["train step"][0]["found"]
    assert "this was not tried on a TPU" in findings["test step"][0]["found"]


@pytest.mark.parametrize("kind", ["--job", "--tpu-ready"])
def test_a_script_that_is_not_there(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dtrain", "doctor", kind, "missing.py"]
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
