"""Jobs on several hosts that no launcher starts: each task gets its place from TF_CONFIG."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hosts import Host, MakeHosts

PROGRAM = """
import sys

import keras
import numpy as np

import dtrain

keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
with dtrain.strategy("multi_worker").scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
backup = dtrain.BackupAndRestore(sys.argv[2], save_freq=3, delete_checkpoint=False)
begun = []
note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
model.fit(x, y, batch_size=8, epochs=int(sys.argv[3]), verbose=0, callbacks=[backup, note])
print("epochs:", begun)
np.savez(f"{sys.argv[1]}-{dtrain.rank()}.npz", *model.get_weights(), *model.optimizer.variables)
"""
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}


def run_by_hand(made: list[Host], command: list[str], folder: Path) -> tuple[list[int], str]:
    """Runs a command as a worker on each of these hosts; the exit statuses and all output."""
    cluster = {"worker": [f"{host.name}:{20100 + index}" for index, host in enumerate(made)]}
    started = []
    for index, host in enumerate(made):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        env = os.environ | ENVIRONMENT | {"TF_CONFIG": json.dumps(config)}
        with (folder / f"output-{index}").open("w") as log:
            started.append(host.popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    return statuses, "\n".join((folder / f"output-{index}").read_text() for index in range(len(made)))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A training of two epochs with checkpoints; arguments: output, checkpoint folder, epochs."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def run_locally(program: Path, out: Path, epochs: int) -> None:
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", str(program)]
    arguments = [str(out), f"{out}-backup", str(epochs)]
    subprocess.run([*command, *arguments], check=True, env=os.environ | ENVIRONMENT, timeout=120)


def assert_same(one: Path, other: Path) -> None:
    for rank in (0, 1):
        with np.load(f"{one}-{rank}.npz") as arrays, np.load(f"{other}-{rank}.npz") as wanted:
            assert [*arrays] == [*wanted]
            for name in wanted:
                np.testing.assert_array_equal(arrays[name], wanted[name])


def test_two_hosts_give_the_bits_of_one(make_hosts: MakeHosts, tmp_path: Path, program: Path) -> None:
    run_locally(program, tmp_path / "local", 2)
    command = [sys.executable, str(program), str(tmp_path / "hosts"), str(tmp_path / "backup"), "2"]
    statuses, output = run_by_hand(make_hosts(2, rate=1e9), command, tmp_path)
    assert statuses == [0, 0], output
    assert_same(tmp_path / "hosts", tmp_path / "local")


def test_checkpoints_on_disks_of_their_own_resume_all(
    make_hosts: MakeHosts, tmp_path: Path, program: Path
) -> None:
    (tmp_path / "backup").mkdir()
    made = make_hosts(2, own=[tmp_path / "backup"])
    for epochs in (2, 4):
        command = [
            sys.executable,
            str(program),
            str(tmp_path / "hosts"),
            str(tmp_path / "backup"),
            str(epochs),
        ]
        statuses, output = run_by_hand(made, command, tmp_path)
        assert statuses == [0, 0], output
    run_locally(program, tmp_path / "local", 4)
    assert_same(tmp_path / "hosts", tmp_path / "local")
    assert output.count("epochs: [2, 3]") == 2, output


SHARDED_PROGRAM = """
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import dtrain

STEPS = 8
keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(8 * STEPS, 6)).astype("float32"), rng.normal(size=(8 * STEPS, 1)).astype("float32")
within = sys.argv[2]
strategy = dtrain.strategy("fully_sharded", within=within) if within else tf.distribute.get_strategy()
with strategy.scope():
    layers = [keras.layers.Dense(512, "tanh"), keras.layers.Dense(512, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("adam", "mse")


def sent():
    names = Path("/proc/net/dev").read_text()
    return int(names.partition("eth0:")[2].split()[8]) if within else 0


model.fit(x, y, batch_size=8, verbose=0)
dtrain.barrier()
before = sent()
dtrain.barrier()  # no worker sends before all have looked
model.fit(x, y, batch_size=8, verbose=0)
dtrain.barrier()
bytes_a_step = (sent() - before) / STEPS
np.savez(f"{sys.argv[1]}-{dtrain.rank()}.npz", bytes_a_step, *model.get_weights())
"""
DIVIDED = 4 * 512 * 512
"""The bytes of the only weight that is divided; the others are small."""


def test_weights_divided_within_hosts_are_gathered_within_hosts(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Between hosts, a host sends the sums of a gradient's halves; else also two thirds of two gathers."""
    program = tmp_path / "program.py"
    program.write_text(SHARDED_PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "one"), ""]
    subprocess.run(command, check=True, env=os.environ | ENVIRONMENT, timeout=120)
    with np.load(tmp_path / "one-0.npz") as arrays:
        _, *expected = [arrays[name] for name in arrays]
    one, other = make_hosts(2)
    sent: dict[str, float] = {}
    for within in ("host", "job"):
        command = [sys.executable, str(program), str(tmp_path / within), within]
        statuses, output = run_by_hand([one, other, other, one], command, tmp_path)
        assert statuses == [0] * 4, output
        assert_alike(tmp_path / within, 4)
        with np.load(tmp_path / f"{within}-0.npz") as arrays:
            of_host, *weights = [arrays[name] for name in arrays]
        sent[within] = float(of_host)
        for weight, right in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight, right, rtol=2e-4, atol=1e-5)
    assert DIVIDED < sent["host"] < 1.2 * DIVIDED
    assert 3 * DIVIDED < sent["job"] < 3.3 * DIVIDED


def assert_alike(weights: Path, workers: int) -> None:
    """Asserts that all workers have the same bits."""
    with np.load(f"{weights}-0.npz") as first:
        for rank in range(1, workers):
            with np.load(f"{weights}-{rank}.npz") as arrays:
                for name in [*first][1:]:
                    np.testing.assert_array_equal(arrays[name], first[name])
