"""Workers that are ranks of an MPI start are killed at named steps; the job goes on as without MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_jobs import (
    Training,
    assert_nothing_left,
    assert_recovered,
    assert_same,
    run,
)
from mpi_jobs import needs_mpi
from processes import traces

pytestmark = [pytest.mark.timeout(600), needs_mpi]

COMMON = {"strategy": "multi_worker", "epochs": 2, "over_mpi": True}
FAULTS = [
    {"kind": "SIGKILL", "step": 10, "worker": "worker:1"},
    {"kind": "SIGTERM", "step": 20, "worker": "worker:1"},
    {"kind": "SIGKILL", "step": 31, "worker": "worker:0"},
]


def test_a_rank_is_killed_and_the_job_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The undisturbed training comes first in the same program, so that processes are started once."""
    plain = Training(tmp_path / "plain", {**COMMON, "save": None})
    broken = Training(tmp_path / "broken", {**COMMON, "faults": FAULTS})
    job = run([plain, broken], workers=2, options=("--mpi", "--max-restarts", "3"))
    assert job.text.count("All are started again") == 3, job.text
    for number, task in ((0, "worker 1"), (2, "worker 0")):
        killed = rf"{task} was killed by signal 9 \(SIGKILL\).*\. All are started again"
        assert job.first(killed) > broken.fault(number)["time"]
        assert_recovered(job, broken, number)
    assert_same(broken, plain.result())
    assert_nothing_left(broken)
    assert not traces(job.pid)
