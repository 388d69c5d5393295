"""Kills at every write of a checkpoint: what was committed stays whole, and the next attempt goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_kills import try_kills
from dtrain.checkpoint.stored import committed, read_share

ENDING = """
import atexit, sys, threading
import tensorflow as tf
from dtrain.checkpoint import storages
from dtrain.checkpoint.store import CheckpointStore

ends = threading.Event()

class Files(storages.LocalFiles):
    def write_tensors(self, *args):
        ends.wait()  # the program ends before anything is written
        super().write_tensors(*args)

storages.STORAGES["file"] = Files()
alone = CheckpointStore(sys.argv[1] + "/alone", token="a")
left = CheckpointStore(sys.argv[1] + "/left", token="a", writer=0, writers=2, patience=1e9)
state = {f"weights{number}": tf.random.normal([10_000]) for number in range(20)}
left.save(1, state)
alone.save(1, state)
atexit.register(ends.set)  # the last to be registered is the first to be called
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=pytest.mark.soak("the others try each third operation"))]
)
def test_kills_at_operations_of_either_writer(every: int, tmp_path: Path) -> None:
    """Each operation's turn comes with `make test-soak`; here a third of them, of every checkpoint."""
    lives = try_kills(tmp_path, every=every)
    assert len(lives) * every > 100
    torn = [life for life in lives if life["torn"] is not None]
    assert sum(life["status"] != -9 for life in torn) * every > 8, "the kernel must end some within a write"
    # The operation that counts is one of many: before it the checkpoint is lost, after it is there.
    assert {life["newest"] for life in lives} == {0, 10, 20, 30, 40}


def test_a_program_that_ends_finishes_its_own_writing_and_waits_for_nobody(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    (whole,) = committed(str(tmp_path / "alone"))
    assert len(read_share(whole, 0)) == 20
    assert committed(str(tmp_path / "left")) == []  # the other writer's share never comes
