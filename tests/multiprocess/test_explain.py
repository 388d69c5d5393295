"""`dtrain explain`: two steps of a script as a job, and what its replicas communicate, with its lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import processes_with, wait_until

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


def explain(
    folder: Path, program: str, *options: str, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(program)
    command = [sys.executable, "-m", "dtrain", "explain", *options, "script.py", *arguments]
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
    assert "1 replica, is not divided between replicas" in done.stderr


@pytest.mark.long
def test_two_steps_of_a_job(tmp_path: Path) -> None:
    done = explain(tmp_path, TRAIN, arguments=("--epochs", "9"))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "ok    job: 2 workers made 2 steps each." in lines
    assert "ok    strategy: MultiWorkerMirroredStrategy, 2 replicas." in lines
    assert "ok    devices: worker 0: CPU:0; worker 1: CPU:0." in lines
    assert "ok    transport: ring" in done.stderr and "s per step" in lines[-1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["script.py"]  # the epoch has not ended


@pytest.mark.long
def test_a_task_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    done = explain(tmp_path, RAISES)
    assert done.returncode == 1 and done.stdout == ""
    assert "fail  job: worker 1: ValueError: the second one is not well (script.py:5)." in done.stderr
    assert "      Remedy: " in done.stderr


def test_data_that_the_script_divides_by_itself_is_named(tmp_path: Path) -> None:
    done = explain(tmp_path, SHARDED)
    assert done.returncode == 1, done.stderr
    found, remedy = done.stderr.splitlines()[-2:]
    assert "The workers read other examples" in found and "the dataset has a shard()" in found
    assert "give every worker the same data" in remedy


def test_a_script_without_a_step_is_ended(tmp_path: Path) -> None:
    done = explain(tmp_path, OWN_LOOP, "--workers", "1", "--time-limit", "3")
    assert done.returncode == 1 and "no step was seen within 3 s" in done.stderr
    assert not processes_with("dtrain.diagnosis.first_steps", str(tmp_path))
    done = explain(tmp_path, "print('done')", "--workers", "1")
    assert done.returncode == 1 and "ended by itself" in done.stderr


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
    command = [sys.executable, "-m", "dtrain", "explain", str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        wait_until(lambda: len(processes_with("first_steps", str(tmp_path))) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
    assert not processes_with("first_steps", str(tmp_path))
