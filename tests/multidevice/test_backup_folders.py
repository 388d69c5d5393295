"""A folder of checkpoints belongs to one live job; resuming with other settings warns, or is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dtrain
from dtrain.checkpoint import Checkpoints, folder_lock
from dtrain.checkpoint.group import Group
from dtrain.errors import CheckpointError, ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from given_clock import GivenClock
from refusals import refused

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
LIMIT = 120.0

OWNER = """
import fcntl, json, os, signal, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX)
os.pwrite(descriptor, json.dumps({"host": "there", "pid": os.getpid(), "since": 0}).encode(), 0)
print("held", flush=True)
signal.pause()
"""

JOB = """
import sys, keras, numpy as np, dtrain
seed, rate, epochs = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
keras.utils.set_random_seed(seed)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(rate), "mse")
x = np.ones((16, 3), "float32")
printer = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, flush=True))
model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=[printer, dtrain.BackupAndRestore(sys.argv[1])])
"""


def build(optimizer: Any, seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(folder: Path, optimizer: Any, epochs: int, seed: int = 1) -> Any:
    backup = dtrain.BackupAndRestore(folder, delete_checkpoint=False)
    return build(optimizer, seed).fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[backup])


def test_a_folder_that_another_process_uses(tmp_path: Path) -> None:
    alone = ReplicaLayout(), Group(members=(0,), mine=0, token="a")
    clock = GivenClock()
    fit(tmp_path, keras.optimizers.SGD(0.1), 1)
    before = sorted(tmp_path.rglob("*"))
    assert not list(tmp_path.rglob(folder_lock.NAME))
    command = [sys.executable, "-c", OWNER, str(tmp_path / folder_lock.NAME)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == "held\n"
            with refused(CheckpointError, tmp_path, f"process {owner.pid}", "'there'"):
                folder_lock.FolderLock(str(tmp_path), *alone, clock=clock)
            assert clock.now() - 1000.0 == pytest.approx(folder_lock.PATIENCE, abs=0.11)
        finally:
            owner.kill()
    # What a killed owner has left blocks nobody.
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / folder_lock.NAME])
    assert len(fit(tmp_path, keras.optimizers.SGD(0.1), 2).history["loss"]) == 2


def test_a_later_attempt_takes_a_folder_over_and_the_earlier_one_commits_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier process only holds its lock here: it may be stopped, or on a host that is cut off."""
    alone = ReplicaLayout(), Group(members=(0,), mine=0, token="a")
    monkeypatch.setenv("DTRAIN_JOB", "job")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / folder_lock.NAME)], stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == "held\n"
            about = {"host": "there", "pid": owner.pid, "since": 0, "job": "job", "attempt": 1}
            (tmp_path / folder_lock.NAME).write_text(json.dumps(about))
            monkeypatch.setenv("DTRAIN_ATTEMPT", "1")
            with refused(CheckpointError, tmp_path, f"process {owner.pid}"):
                folder_lock.FolderLock(str(tmp_path), *alone, clock=GivenClock())
            monkeypatch.setenv("DTRAIN_ATTEMPT", "2")
            lock = folder_lock.FolderLock(str(tmp_path), *alone)
            lock.check()
        finally:
            owner.kill()
    # Now this process is the earlier one.
    checkpoints = Checkpoints(tmp_path, build("sgd"))
    checkpoints.save(1)
    checkpoints.wait()
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / folder_lock.NAME).unlink()
    (tmp_path / folder_lock.NAME).write_text("the later attempt's")
    checkpoints._folder.store.save(2, {})
    assert checkpoints._folder.store.wait()
    assert "A later attempt of this job has" in (checkpoints._folder.store.take_problem() or "")
    with refused(CheckpointError, tmp_path, "was replaced while it was stopped or cut off"):
        checkpoints.save(3)
    checkpoints._folder.close()
    checkpoints._folder.release()
    lock.release()
    assert sorted(tmp_path.rglob("*")) == before


def test_loops_hold_their_folder_until_they_are_closed(tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    model = build("sgd")
    # One process is one owner, however it names the folder.
    first, second = Checkpoints(folder, model), Checkpoints(f"file://{folder}", model)
    first.save(1)
    first.close()
    assert (folder / folder_lock.NAME).exists()
    second.close(delete=True)
    assert not folder.exists()


def test_other_settings_cause_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, keras.optimizers.SGD(0.1, momentum=0.9), 1)
    fit(tmp_path, keras.optimizers.SGD(0.1, momentum=0.9), 2)  # more epochs are no other settings
    assert "other settings" not in caplog.text
    fit(tmp_path, keras.optimizers.SGD(0.02, momentum=0.5), 3, seed=2)
    (message,) = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    for words in (
        "the optimizer's learning_rate was 0.1",
        "and is 0.02",
        "the checkpoint's counts: 0.1",
        "the optimizer's momentum was 0.9 and is 0.5 (the program's counts)",
        "the seed was 1 and is 2",
        "Give this run a folder of its own",
    ):
        assert words in message, message


def test_a_rate_that_training_has_changed_is_no_other_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(keras.optimizers.SGD(0.1))
    backup = dtrain.BackupAndRestore(tmp_path, delete_checkpoint=False)
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    for epochs in (1, 2):
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[halved, backup])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)
    assert "other settings" not in caplog.text
    build(keras.optimizers.SGD(0.2)).fit(X, Y, epochs=3, verbose=0, callbacks=[halved, backup])
    assert "the optimizer's learning_rate was 0.05 and is 0.2" in caplog.text


def test_another_optimizer_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, keras.optimizers.Adam(), 1)
    with refused(CheckpointError, "optimizer Adam", "AdamW"):
        fit(tmp_path, keras.optimizers.AdamW(), 2)
    model = build(keras.optimizers.SGD(0.1, momentum=0.9))
    loop = Checkpoints(tmp_path / "loop", model)
    loop.save(1)
    loop.close()
    other = build(keras.optimizers.Adagrad())
    with refused(CheckpointError, "optimizer SGD", "Adagrad"):
        Checkpoints(tmp_path / "loop", other).restore()


@pytest.mark.long
def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    """The second is refused while the first lives, and message of the differences once it was killed."""
    folder = str(tmp_path / "backup")

    def job(*arguments: str) -> list[str]:
        return [sys.executable, "-c", JOB, folder, *arguments]

    with subprocess.Popen(job("1", "0.1", "1000000"), stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "0\n"
            second = subprocess.run(job("2", "0.01", "3"), capture_output=True, text=True, timeout=LIMIT)
            with refused(CheckpointError, folder, f"process {first.pid}"):
                Checkpoints(folder, build("sgd"))
        finally:
            first.send_signal(signal.SIGKILL)
    assert second.returncode == 1
    assert f"CheckpointError: The folder {folder} is in use by process {first.pid}" in second.stderr
    third = subprocess.run(job("2", "0.01", "3"), capture_output=True, text=True, timeout=LIMIT)
    assert third.returncode == 0, third.stderr
    assert "the seed was 1 and is 2" in third.stderr and "learning_rate was 0.1" in third.stderr


def test_weights_are_restored_into_a_built_model_only(tmp_path: Path) -> None:
    fit(tmp_path, keras.optimizers.SGD(0.1), 1)
    backup = dtrain.BackupAndRestore(tmp_path)
    model = keras.Sequential([keras.layers.Dense(1)], name="unbuilt")
    with refused(ConfigurationError, "'unbuilt' is not built"):
        backup.restore_weights(model)
    model.build((None, 3))
    assert backup.restore_weights(model) == 1
    assert np.abs(model.get_weights()[0]).max() > 0
