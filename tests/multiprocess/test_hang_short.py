"""A worker in a deadlock is found by the real launcher, and the job goes on; more kinds in tests/faults."""

from __future__ import annotations

from pathlib import Path

from watched_jobs import run


def test_a_deadlock_in_a_callback(tmp_path: Path) -> None:
    ended = run(tmp_path, "deadlock", options=("--hang-timeout", "10"))
    assert ended.status == 0, ended.text
    verdict = ended.first("has made no progress")
    assert verdict.startswith("[dtrain] worker 1 has made no progress for 1"), verdict
    assert "it is in a callback while the others wait for it, at step 20" in verdict
    assert {*ended.attempts()} == {0, 1}  # a spare that begins anew says its attempt twice
    assert "job.py" in ended.stacks("worker 0")
    assert "in stop" in ended.stacks("worker 1")
    assert len(ended.digests()) == 1, ended.text
