"""A real job that goes on with fewer workers and takes an absent one in again, without TensorFlow.

The rules about who is left out, and when it is tried again, are in `tests/unit/test_simulated_members.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from restart_jobs import run


def test_one_that_does_not_come_up_is_left_out_and_taken_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 is the absent one, so the other gets another index; the first later try succeeds."""
    monkeypatch.setenv("DTRAIN_REJOIN_SECONDS", "0.1")
    ended = run(
        tmp_path,
        """
        assert os.environ["DTRAIN_WORKERS_MAX"] == "2"
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(channel.RUN_AGAIN))
        if attempt < 2:
            wait_for(lambda: len(lives(attempt)) == 2)
            die() if place == 0 else hang()
        channel.report_checkpoint(5, "/usr")
        step(5 + attempt)
        if workers == 1:
            hang()  # until it is asked to end
        wait_for(lambda: len(lives(attempt)) == 2)
        """,
        min_workers=1,
        max_restarts=1,
    )
    assert ended.status == 0, ended.err
    assert ended.attempts() == [[0, 1], [0, 1], [1], [0, 1]]
    assert [name.split("-")[1] for name in ended.lives if name.split("-")[2] == "2"] == ["0"]
    assert "the absent one (place 0) is tried again after 0.1 s." in ended.err
    assert "The job continues with 1 of 2 workers" in ended.err
    assert "Tasks are asked to save and to end" in ended.err
