"""Checkpoints that are damaged between two runs, disks that are full, and folders that vanish."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_jobs import (
    Training,
    assert_nothing_left,
    assert_recovered,
    assert_same,
    run,
    small_disk,
    undisturbed,
)

pytestmark = pytest.mark.timeout(1800)

KILLED = 128 + signal.SIGKILL
NOT_AGAIN = ("--max-restarts", "0")


def newest_first(training: Training) -> list[Path]:
    """The whole checkpoints of a training."""
    markers = (training.folder / "backup").glob("fit-0/step-*/COMMITTED.json")
    return sorted((path.parent for path in markers), reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def cut(checkpoint: Path) -> None:
    """Truncates its largest file."""
    data = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)


def flip(checkpoint: Path) -> None:
    """Flips one bit in the middle of its largest file."""
    data = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)


def test_damaged_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """The newest is cut, then one bit of the newest flipped, then all are damaged."""
    (expected,) = undisturbed(tmp_path / "undisturbed", "one", {})
    faults = [{"kind": "SIGKILL", "step": step} for step in (30, 40, 50)]
    options = {"faults": faults, "save": {"save_freq": 4, "keep": 3}}
    training = Training(tmp_path / "job", options)
    run([training], status=KILLED, options=NOT_AGAIN)
    for damage in (cut, flip):
        newest, before, *_ = newest_first(training)
        damage(newest)
        made = len(training.steps())
        job = run([training], status=KILLED, options=NOT_AGAIN)
        assert re.search(rf"{newest}.*( is not used|The previous checkpoint is used)", job.text), job.text
        assert training.steps()[made][1] == step_of(before) + 1
    for checkpoint in newest_first(training):
        flip(checkpoint)
    made = len(training.steps())
    job = run([training], options=NOT_AGAIN)
    assert "raining starts from the beginning" in job.text, job.text
    assert training.steps()[made][1] == 1
    assert_same(training, expected)
    assert_nothing_left(training)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for a job that is a disk of one megabyte; the test is skipped where none can be mounted."""
    folder = tmp_path / "job" / "disk"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(folder, "1m"))
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        yield folder


def test_a_full_disk_and_a_folder_that_vanishes(tmp_path: Path, disk: Path) -> None:
    """The job goes on, says so, saves again when it can, and goes on from there when it is killed."""
    (expected,) = undisturbed(tmp_path / "undisturbed", "multi_worker", {})
    faults = [
        {"kind": "fill", "step": 9},
        {"kind": "free", "step": 27},
        {"kind": "SIGKILL", "step": 42, "worker": "worker:1"},
        {"kind": "vanish", "step": 45},
        {"kind": "SIGKILL", "step": 58},
    ]
    options = {"strategy": "multi_worker", "backup": "disk/backup", "faults": faults}
    training = Training(tmp_path / "job", {**options, "save": {"save_freq": 4}})
    job = run([training], workers=2)
    assert "was not written to" in job.text, job.text
    assert "Training continues, and the next checkpoint will be tried as usual." in job.text
    for number, newest in ((2, 40), (4, 56)):
        assert training.fault(number)["committed"] == newest, "it was not saved again"
        assert_recovered(job, training, number)
    assert_same(training, expected)
    assert_nothing_left(training)
    assert list(disk.iterdir()) == []
