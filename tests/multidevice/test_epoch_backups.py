"""What a job that is started again goes on from: weights, optimizer and the number of the epoch, if whole."""

from __future__ import annotations

import logging
from pathlib import Path

import keras
import numpy as np
import pytest

from dtrain.checkpoint import EpochBackups, NoBackups, epoch_backups

X = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
Y = X.sum(axis=1, keepdims=True)


def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.05), "mse")
    return made


def fit(made: keras.Model, backups: EpochBackups | NoBackups, epochs: int) -> keras.Model:
    done = backups.restore(made)
    made.fit(
        *(X, Y), epochs=epochs, initial_epoch=done, shuffle=False, verbose=0, callbacks=backups.callbacks()
    )
    return made


def test_going_on_gives_the_same_numbers(tmp_path: Path) -> None:
    whole = fit(model(), NoBackups(), 5)
    backups = EpochBackups(tmp_path / "backups")
    fit(model(), backups, 2)
    resumed = model()
    assert backups.restore(resumed) == 2
    fit(resumed, backups, 5)
    for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(resumed.optimizer.iterations) == 5
    backups.remove()
    assert not list(tmp_path.iterdir())
    assert backups.restore(model()) == 0


def test_a_backup_that_is_not_whole_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backups = EpochBackups(tmp_path)
    fit(model(), backups, 3)
    newest = max(tmp_path.iterdir())
    for size in (newest.stat().st_size // 2, 100, 0):
        newest.write_bytes(newest.read_bytes()[:size])
        with caplog.at_level(logging.WARNING, logger="dtrain"):
            assert backups.restore(model()) == 2
        assert f"{newest} is not whole" in caplog.text


def test_only_where_the_launcher_starts_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRAIN_JOB", raising=False)
    assert isinstance(epoch_backups(tmp_path), NoBackups)
    monkeypatch.setenv("DTRAIN_JOB", "a")
    assert isinstance(epoch_backups(tmp_path), EpochBackups)
