"""Processes are killed at random moments, from outside, and the job ends as if it had been left alone."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from fault_jobs import Job, Training, assert_nothing_left, assert_same, kill, undisturbed, wait_for

LONGEST = 3.0  # seconds between two kills, at most: they come whatever the job does at that time
AT_WORK = 0.6  # of the kills, the part before which the job is let come to a step again
SEED = 20
# Saved twice a second, so that many kills fall into a checkpoint.
OPTIONS = {"epochs": 5, "settle": False, "pause": 0.05, "hold": True, "save": {"save_freq": 8}}


@pytest.mark.soak("the tests of faults kill each process at a named step")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("strategy", "workers", "kills"),
    [
        ("multi_worker", 2, 2),
        ("multi_worker", 2, 10),
        ("mirrored", 1, 10),
        ("one", 1, 10),
    ],
)
def test_kills_at_random_moments_change_no_bit(
    strategy: str, workers: int, kills: int, tmp_path: Path
) -> None:
    (expected,) = undisturbed(tmp_path / "undisturbed", strategy, {"epochs": OPTIONS["epochs"]})
    training = Training(tmp_path / "chaos", {**OPTIONS, "strategy": strategy})
    options = ("--max-restarts", "30")
    with Job([training], workers=workers, options=options) as job:
        killed = kill_at_random(kills, job, training, random.Random(f"{SEED} {strategy}"))
        (training.folder / "go").touch()
        status = job.wait()
    print(f"{killed} were killed; restarts: {job.text.count('All are started again')}")
    assert status == 0, job.text
    # Two may have died of one restart, and one while the others were being ended.
    assert kills // 2 <= job.text.count("All are started again") <= kills
    assert_same(training, expected)
    assert_nothing_left(training)


def kill_at_random(kills: int, job: Job, training: Training, chance: random.Random) -> list[str]:
    """Kills so many tasks, whatever they are doing; what they were doing."""
    killed: list[str] = []
    made = 0
    for _ in range(kills):
        if chance.random() < AT_WORK:
            # The job may have come to its last step, where it waits: a kill lets it make steps again.
            wait_for(lambda made=made: stepped(training) > made, job)
        time.sleep(chance.uniform(0.0, LONGEST))  # wall clock: chaos comes at any time
        while not (tasks := tasks_of(job, training)):
            assert not job.over, job.text
            time.sleep(0.02)
        made = stepped(training)
        pid = chance.choice(tasks)
        killed.append(stage_of(pid, training))
        kill(pid)
    return killed


def tasks_of(job: Job, training: Training) -> list[int]:
    """The launcher's children that are tasks now: spares have written no line yet."""
    lives = training.folder / "lives"
    begun = {line.split()[1] for line in lives.read_text().splitlines()} if lives.exists() else set()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        waits = b"DTRAIN_SPARE=" in variables and entry.name not in begun
        if int(parent) == job.pid and state != "Z" and b"fault_program" in command and not waits:
            pids.append(int(entry.name))
    return sorted(pids)


def stepped(training: Training) -> int:
    """How many steps were made by now, in all lives."""
    return len(training.steps()) if (training.folder / "steps").exists() else 0


def stage_of(pid: int, training: Training) -> str:
    """What a process has done by now."""
    steps: list[Any] = training.steps() if (training.folder / "steps").exists() else []
    return f"{pid} after step {steps[-1][1]}" if steps else f"{pid} before any step"
