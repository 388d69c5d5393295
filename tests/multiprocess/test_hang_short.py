"""A worker in a deadlock is found by the real launcher, and the job goes on; more kinds in tests/faults."""

from __future__ import annotations

from pathlib import Path

from watched_jobs import run


def test_a_deadlock_in_a_callback(tmp_path: Path) -> None:
    ended = run(tmp_path, "deadlock", options=("--hang-timeout", "5"))
    assert ended.status == 0, ended.text
    verdict = ended.first("has made no progress")
    assert 4.5 <= verdict.at - ended.first(r"fault \d").at <= 7.0, ended.text
    assert verdict.text.startswith("[dtrain] worker 1 has made no progress for 5"), verdict.text
    assert "it is in a callback while the others wait for it, at step 20" in verdict.text
    assert "job.py" in ended.stacks("worker 0")
    assert "in stop" in ended.stacks("worker 1")
    assert len(ended.digests()) == 1, ended.text
