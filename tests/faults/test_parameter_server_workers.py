"""Training on parameter servers: many runs, more workers, and workers that are killed or stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parameter_server_cases.registry import LOSSES, SLOW, WITH_ANY_WORKERS, listed
from parameter_server_cases.running import Finished, run_cases

pytestmark = pytest.mark.timeout(900)

OFTEN = (
    "every_example_counts_once_from_any_input",
    "evaluate_is_what_predict_says",
    "updates_are_never_torn",
    "accumulation_goes_on_from_what_was_left",
    "a_loop_of_the_coordinators",
    "every_overlapped_step_is_applied_once",
)
LIMIT = 600.0


def only(names: tuple[str, ...] | list[str], *more: str) -> tuple[str, ...]:
    return ("--only", ",".join(names), "--seconds", "300", *more)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("killed")
    options = only(listed(LOSSES))
    return run_cases(folder, limit=LIMIT, max_restarts=20, options=options, DTRAIN_STUCK_TIMEOUT="3")


@pytest.mark.parametrize(
    ("workers", "runs", "names"),
    [
        pytest.param(2, 1, SLOW, id="slow cases once"),
        pytest.param(2, 20, (*OFTEN, *SLOW), id="20 times", marks=pytest.mark.soak),
        pytest.param(4, 8, OFTEN, id="four workers", marks=pytest.mark.soak),
    ],
)
def test_counts_are_exact_in_every_run(
    workers: int, runs: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    finished = run_cases(tmp_path, limit=LIMIT, workers=workers, options=only(names, "--runs", str(runs)))
    for name in names:
        finished.check(name)
    assert finished.status == 0, finished.output[-5000:]


@pytest.mark.soak
def test_overlap_with_one_worker(tmp_path: Path) -> None:
    names = listed(WITH_ANY_WORKERS, slow=True)
    finished = run_cases(tmp_path, limit=LIMIT, workers=1, options=only(names))
    for name in names:
        finished.check(name)
    assert finished.status == 0, finished.output[-5000:]


@pytest.mark.parametrize("name", listed(LOSSES))
def test_case_with_lost_workers(name: str, killed: Finished) -> None:
    killed.check(name)


def test_a_stopped_worker_is_named(killed: Finished) -> None:
    # It was stopped in a step, or while a message of the chief's to it was on its way.
    stuck = r"worker 1 is stuck: (it has had 1 step|nothing has happened) for \d+ s; it does not answer"
    assert re.search(stuck, killed.output)
    assert "worker 1 will be started again; its steps go to another one" in killed.output


def test_the_job_ends_well_after_all_that(killed: Finished) -> None:
    assert killed.status == 0, killed.output[-5000:]
    assert "The whole job is started again" not in killed.output
