"""Jobs that go on with fewer workers, and take absent ones in again: real processes, without TensorFlow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from restart_jobs import Ended, run

pytestmark = pytest.mark.long


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Ended]:
    return functools.partial(run, tmp_path)


def test_one_that_does_not_come_up_is_left_out_and_taken_in_again(
    launch: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 is the absent one, so the others get new numbers; it comes back at the second try."""
    monkeypatch.setenv("DTRAIN_REJOIN_SECONDS", "1")
    start = time.monotonic()
    ended = launch(
        """
        assert os.environ["DTRAIN_WORKERS_MAX"] == "3"
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(channel.RUN_AGAIN))
        if attempt == 0:
            step(5)
            wait_for(lambda: len(lives(0)) == 3)
            die() if place == 0 else hang()
        if place == 0 and len(list(folder.glob("0-*"))) < 5:
            die()
        if index == 0:
            channel.report_checkpoint(5, "/usr")
        step(5 + attempt)
        print("at work", attempt, workers, flush=True)
        hang() if workers == 2 or attempt < 4 else time.sleep(1)
        """,
        workers=3,
        min_workers=2,
        max_restarts=1,
        grace=10.0,
    )
    assert ended.status == 0, ended.err
    # Twice in vain at first, once in vain when it is tried again, and then it works.
    assert ended.attempts() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
    assert 3.0 < time.monotonic() - start < 20, "1 s until the first try, 2 until the second"
    indices = {name.split("-")[0]: name.split("-")[1] for name in ended.lives if name.split("-")[2] == "3"}
    assert indices == {"1": "0", "2": "1"}
    assert "It does not start: the absent one (place 0) is tried again after 1 s." in ended.err
    assert "The job continues with 2 of 3 workers, from the checkpoint of step 5 in /usr." in ended.err
    assert "the absent one (place 0) is tried again after 2 s" in ended.err
    assert ended.err.count("Tasks are asked to save and to end") == 2
    assert ended.err.count("wants to be run again") == 2
    assert "The absent worker (place 0) is tried again: 3 workers." in ended.err


@pytest.mark.parametrize("fewest", [1, 2])
def test_two_that_were_never_there(launch: Callable[..., Ended], fewest: int) -> None:
    """With enough others left, the job goes on; with fewer, it says so and ends."""
    ended = launch(
        """
        wait_for(lambda: len(lives(attempt)) == workers)
        if place > 0:
            die() if place == 1 or workers == 2 else hang()
        if workers > 1:
            hang()
        step(1)
        """,
        workers=3,
        min_workers=fewest,
        max_restarts=3,
    )
    whole, two, one = [0, 1, 2], [0, 2], [0]
    if fewest == 1:
        assert ended.status == 0, ended.err
        assert ended.attempts() == [whole, whole, two, two, one]
    else:
        assert ended.status == 137
        assert ended.attempts() == [whole, whole, two, two]
        last = ended.err.splitlines()[-1]
        assert last.endswith("The job needs 2 workers, and 1 would be left (--workers 2:3).")


def test_tasks_that_keep_no_checkpoints_are_not_asked(
    launch: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal would kill them: they have no handler."""
    monkeypatch.setenv("DTRAIN_REJOIN_SECONDS", "0.2")
    ended = launch(
        """
        if place == 1:
            die()
        if workers == 1:
            step(1)
            time.sleep(1.5)
        else:
            hang()
        """,
        min_workers=1,
    )
    assert ended.status == 0, ended.err
    assert ended.attempts() == [[0, 1], [0, 1], [0]]


def test_a_program_that_is_broken_is_not_tried_with_fewer(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        wait_for(lambda: len(lives(attempt)) == workers)
        if place:
            raise ValueError("broken")
        hang()
        """,
        min_workers=1,
    )
    assert (ended.status, ended.attempts()) == (1, [[0, 1]])
