"""What a user sees of a job of two workers: one bar, one run of each tracker, and the worker that is slow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain.monitor.report import text
from dtrain.monitor.report.header import figures
from dtrain.monitor.run_reader import read_run
from dtrain.telemetry.events import PARTS

SKIPPED = 900.0  # less than the program skips in one go, and more than a test may take

PROGRAM = """
import json, os, time
from pathlib import Path

os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
os.environ["MLFLOW_TRACKING_URI"] = Path("mlruns").absolute().as_uri()
import keras, numpy as np, tensorflow as tf
from absl import logging
import mlflow
from mlflow.keras import MlflowCallback
import wandb
from wandb.integration.keras import WandbMetricsLogger

import dtrain
from dtrain.monitor import Monitor, on_chief

# What is skipped on dtrain's clock outweighs all other times, however long the machine takes for them.
from dtrain.telemetry.training_clock import clock
real, skipped = clock.now, 0.0
clock.now = lambda: real() + skipped
def skip(seconds=1000.0):
    global skipped
    skipped += seconds

strategy = dtrain.MultiWorkerMirroredStrategy()
logging.set_verbosity("info")
logging.info("a line of the program")
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)

def make():
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model

def logger():
    wandb.init(project="test", dir=".")
    return WandbMetricsLogger()

skips = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: skip())
model, callbacks = make(), [Monitor("run"), on_chief(logger), MlflowCallback(), skips]
begun = clock.now()
history = model.fit(x, y, batch_size=32, epochs=3, validation_data=(x, y), callbacks=callbacks)
wall = clock.now() - begun
Path(f"wall-{dtrain.rank()}").write_text(f"{wall} {sum(each['seconds'] for each in history.time_report)}")
if dtrain.is_chief():
    wandb.finish()
    mlflow.end_run()

class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if dtrain.rank() == 1:
            skip()

stopped = real()
clock.now = lambda: stopped + skipped
callbacks = [Monitor("slow"), Slow()]
history = make().fit(x[:160], y[:160], batch_size=32, epochs=2, verbose=0, callbacks=callbacks)
clock.now = lambda: real() + skipped

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(16), keras.layers.Dense(1)
        self.average = keras.metrics.Mean("loss")
    def call(self, x):
        return self.out(self.hidden(x))
    def train_step(self, data):
        skip()  # while it is traced
        rows, wanted = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(rows, training=True) - wanted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.average.update_state(loss)
        return {"loss": self.average.result()}

with strategy.scope():
    own = Own()
    own.compile("sgd")
begun = clock.now()
report = own.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[Monitor("own")]).time_report
wall = clock.now() - begun
parts = {part: sum(each["parts"][part] for each in report) for part in report[0]["parts"]}
Path(f"own-{dtrain.rank()}").write_text(json.dumps({"wall": wall, "parts": parts, "epochs": report}))

broken = y.copy()
broken[100] = np.nan
history = make().fit(x, broken, batch_size=32, epochs=5, shuffle=False, verbose=0,
    callbacks=[Monitor("nan", on_nan="stop")])
Path(f"epochs-{dtrain.rank()}").write_text(str(len(history.epoch)))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the job, and what it said."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    command = ["-m", "dtrain", "launch", "--workers", "2", "--spares", "none", "train.py"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return folder, done.stdout


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def last_epoch(folder: Path) -> dict[str, Any]:
    return [event for event in events(folder) if event["kind"] == "epoch"][-1]


def test_one_bar_a_job(job: tuple[Path, str]) -> None:
    bars = [line for line in job[1].splitlines() if "━" in line]
    assert all(line.startswith("[worker 0]") for line in bars), bars
    # That of each epoch at its end; an epoch on a slow machine shows its progress before, too.
    assert sum(bool(re.match(r"\[worker 0\] 20/20 ━{20} .* examples/s", line)) for line in bars) == 3, bars


def test_tensorflows_start_is_not_shown(job: tuple[Path, str]) -> None:
    assert "oneDNN" not in job[1] and "InitializeLog" not in job[1]
    assert not re.search(r"^\[\w+ \d\] I0000 ", job[1], re.MULTILINE)
    assert job[1].count("a line of the program") == 2


def test_each_tracker_has_one_run(job: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = job[0]
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs(["0"])
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(loss.step for loss in losses) == [0, 1, 2]


def test_the_time_of_each_worker_is_known(job: tuple[Path, str]) -> None:
    for rank in range(2):
        wall, counted = map(float, (job[0] / f"wall-{rank}").read_text().split())
        assert 0.9 * wall < counted <= wall  # wall clock: a part of a measured whole
    epoch = last_epoch(job[0] / "run")
    assert [worker["task"] for worker in epoch["workers"]] == ["worker 0", "worker 1"]
    assert epoch["parts"]["communication"] > 0.0
    assert (epoch["steps"], epoch["examples"]) == (20, 640)
    for worker in epoch["workers"]:
        assert set(worker["parts"]) == set(PARTS) and worker["epoch"] == 2 and worker["host"]
        assert 0.0 <= worker["own_step_seconds"] <= worker["step_seconds"]
    assert [event["kind"] for event in events(job[0] / "run")].count("end") == 1
    record = json.loads((job[0] / "run" / "run.json").read_text())
    assert (record["status"], record["workers"], record["replicas"]) == ("finished", 2, 2)
    assert record["communication"]["name"] == "ring"


def test_the_parts_of_an_own_step_add_up_and_tracing_it_is_the_start(job: tuple[Path, str]) -> None:
    for rank in range(2):
        own = json.loads((job[0] / f"own-{rank}").read_text())
        for epoch in own["epochs"]:
            assert min(epoch["parts"].values()) >= 0.0, epoch
            assert sum(epoch["parts"].values()) == pytest.approx(epoch["seconds"], abs=1e-4)
        # wall clock: parts of a measured whole
        assert 0.9 * own["wall"] < sum(own["parts"].values()) <= own["wall"]
        first, second = own["epochs"]
        assert first["parts"]["start"] == max(first["parts"].values()) and second["parts"]["start"] == 0.0
        assert (
            first["parts"]["start"] > SKIPPED > max(epoch["parts"]["callbacks"] for epoch in (first, second))
        )
        assert 0 < first["steady"]["steps"] < 40 == second["steady"]["steps"]


def test_the_time_of_a_step_is_that_of_steps_that_were_not_traced(job: tuple[Path, str]) -> None:
    first, second = (epoch["steady"] for epoch in json.loads((job[0] / "own-0").read_text())["epochs"])
    record = json.loads((job[0] / "own" / "run.json").read_text())
    assert max(first["seconds"], second["seconds"]) < SKIPPED  # wall clock: the program has moved its clock
    assert record["step_seconds"] == pytest.approx(second["seconds"] / second["steps"], rel=0.01)
    assert record["examples_per_second"] == pytest.approx(16 / record["step_seconds"], rel=0.01)
    run = read_run(job[0] / "own")
    shown = {figure.name: figure.value for figure in figures(run)}
    assert shown["time per step"] == text.seconds(record["step_seconds"])
    assert all(value < SKIPPED for value in run.steps.values["step_seconds"] if value == value)


def test_a_slow_worker_is_named(job: tuple[Path, str]) -> None:
    (cause,) = [c for c in last_epoch(job[0] / "slow")["causes"] if c["cause"] == "slow_worker"]
    assert cause["task"] == "worker 1" and cause["text"].startswith("worker 1 (")
    assert cause["text"].endswith("is in callbacks.") and 0.9 < cause["share"] <= 1.0
    # On a busy machine a worker can be slow in another run too, but in no other is it in callbacks.
    slow = [line for line in job[1].splitlines() if "worker 1 (" in line and "is slow" in line]
    said = [line for line in slow if line.endswith("is in callbacks.")]
    assert len(said) == 1 and said[0].startswith("[worker 0]")


def test_training_ends_on_all_workers_at_a_loss_that_is_no_number(job: tuple[Path, str]) -> None:
    assert [(job[0] / f"epochs-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert [event["alarm"] for event in events(job[0] / "nan") if event["kind"] == "alarm"] == ["nan"]
