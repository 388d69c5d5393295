"""One fault of each kind that is cheap to try, all in one job; `tests/faults` has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_jobs import Training, assert_nothing_left, assert_recovered, assert_same, run

FAULTS = [
    {"kind": "SIGKILL", "step": 10, "worker": "worker:1"},
    {"kind": "exception", "step": 20, "worker": "worker:0", "text": "in a callback"},
    {"kind": "vanish", "step": 22},
    {"kind": "SIGTERM", "step": 30, "worker": "worker:1"},
    {"kind": "SIGKILL", "step": 39, "worker": "worker:0"},
    {"kind": "SIGKILL", "step": 39, "worker": "worker:1"},
]


@pytest.mark.soak("tests/faults has each of these faults in a job of its own")
@pytest.mark.timeout(600)
def test_a_job_that_is_broken_in_many_ways_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The undisturbed training comes first in the same program, so that processes are started once."""
    common = {"strategy": "multi_worker", "epochs": 2}
    plain = Training(tmp_path / "plain", {**common, "save": None})
    broken = Training(tmp_path / "broken", {**common, "faults": FAULTS})
    job = run([plain, broken], workers=2, options=("--max-restarts", "3"))
    assert job.text.count("All are started again") == 4, job.text
    assert job.text.count("has saved a checkpoint and wants to be run again") == 1
    assert "(3 of at most 3 restarts in an hour)" in job.text
    assert "RuntimeError: in a callback" in job.text
    for number in (0, 1, 4):
        assert_recovered(job, broken, number)
    assert_recovered(job, broken, 3, noticed="SIGTERM: the state after step")
    assert_same(broken, plain.result())
    assert_nothing_left(broken)


@pytest.mark.soak("for `make test-matrix`: tests/faults kills once for each kind of data")
@pytest.mark.timeout(300)
def test_a_job_with_one_kill_ends_with_the_same_bits(tmp_path: Path) -> None:
    common = {"strategy": "multi_worker", "epochs": 2}
    plain = Training(tmp_path / "plain", {**common, "save": None})
    killed = Training(tmp_path / "killed", {**common, "faults": FAULTS[:1]})
    job = run([plain, killed], workers=2, options=("--max-restarts", "1"))
    assert job.text.count("All are started again") == 1, job.text
    assert_recovered(job, killed, 0)
    assert_same(killed, plain.result())
    assert_nothing_left(killed)
