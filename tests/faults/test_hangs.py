"""Workers that live and yet do nothing, each at a named step: found, shown, named, and the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from watched_jobs import Watched, run

SOAK = pytest.mark.soak("test_hang_short.py has a deadlock, and a stopped process is found by the same rule")
KINDS = [
    pytest.param("stopped", "its process is stopped (SIGSTOP)", "", id="stopped"),
    pytest.param(
        "deadlock", "it is in a callback while the others wait for it", "in stop", id="deadlock", marks=SOAK
    ),
    pytest.param("python_lock", "its process does not answer", "in stop", id="python_lock", marks=SOAK),
    pytest.param("reader", "it waits for its next batch", "in stop", id="reader", marks=SOAK),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    ended = run(tmp_path_factory.mktemp("undisturbed"), "nothing")
    assert ended.status == 0, ended.text
    assert len(ended.digests()) == 1
    assert ended.attempts() == [0, 0]
    return ended


@pytest.mark.parametrize(("kind", "why", "stack"), KINDS)
def test_a_stuck_worker_is_found_in_time_and_the_job_ends_with_the_same_weights(
    kind: str, why: str, stack: str, tmp_path: Path, undisturbed: Watched
) -> None:
    ended = run(tmp_path, kind)
    assert ended.status == 0, ended.text
    verdict = ended.first(r"has made no progress for")
    assert verdict.startswith("[dtrain] worker 1 has made no progress"), verdict
    assert why in verdict
    step = re.search(r"(?:at|last heard of at) step (\d+)", verdict)
    # A process that is stopped as a whole may have gone on for a fifth of a second after its last report.
    assert step is not None
    assert int(step[1]) in ((19, 20) if "last heard" not in verdict else range(21)), verdict
    # The one that waits shows where it waits, and the stuck one where it is stuck.
    assert "job.py" in ended.stacks("worker 0"), ended.text
    assert stack in ended.stacks("worker 1"), ended.text
    assert "restarts in an hour" in ended.text, ended.text
    assert ended.digests() == undisturbed.digests(), ended.text
