"""Training on parameter servers: many runs, more workers, and workers that are killed or stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parameter_server_cases.registry import LOSSES, REPEATED, SLOW, WITH_ANY_WORKERS, listed
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
MORE = pytest.mark.soak("the same cases run once, with two workers")


def only(names: tuple[str, ...] | list[str], *more: str) -> tuple[str, ...]:
    return ("--only", ",".join(names), "--seconds", "300", *more)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """The jobs of the cases, by case: the first case, which kills five times, has one of its own.

    The more restarts a job has had, the longer it waits before the next.
    """
    names = listed(LOSSES)
    by_case: dict[str, Finished] = {}
    for part in (names[:1], names[1:]):
        job = run_cases(
            tmp_path_factory.mktemp("killed"),
            limit=LIMIT,
            max_restarts=20,
            options=only(part),
            DTRAIN_STUCK_TIMEOUT="10",
        )
        by_case |= dict.fromkeys(part, job)
    return by_case


@pytest.mark.parametrize(
    ("workers", "runs", "names"),
    [
        pytest.param(2, 1, SLOW, id="slow cases once"),
        pytest.param(2, 20, (*OFTEN, *SLOW, *REPEATED), id="20 times", marks=MORE),
        pytest.param(4, 8, OFTEN, id="four workers", marks=MORE),
    ],
)
def test_counts_are_exact_in_every_run(
    workers: int, runs: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    finished = run_cases(tmp_path, limit=LIMIT, workers=workers, options=only(names, "--runs", str(runs)))
    for name in names:
        finished.check(name)
    assert finished.status == 0, finished.output[-5000:]


@MORE
def test_overlap_with_one_worker(tmp_path: Path) -> None:
    names = listed(WITH_ANY_WORKERS, slow=True)
    finished = run_cases(tmp_path, limit=LIMIT, workers=1, options=only(names))
    for name in names:
        finished.check(name)
    assert finished.status == 0, finished.output[-5000:]


@pytest.mark.parametrize("name", listed(LOSSES))
def test_case_with_lost_workers(name: str, killed: dict[str, Finished]) -> None:
    killed[name].check(name)


def test_a_stopped_worker_is_named(killed: dict[str, Finished]) -> None:
    output = killed["a_stopped_worker_is_started_again"].output
    # It was stopped in a step, or while a message of the chief's to it was on its way.
    what = "(it has been at work on 1 step|nothing has happened)"
    assert re.search(rf"worker 1 is stuck: {what} for \d+ s; it does not answer", output)
    assert "worker 1 will be started again; its steps go to another one" in output


@pytest.mark.parametrize("name", listed(LOSSES))
def test_its_job_ends_well_after_all_that(name: str, killed: dict[str, Finished]) -> None:
    job = killed[name]
    assert job.status == 0, job.output[-5000:]
    assert len(re.findall(r"chief 0 started, process", job.output)) == 1
