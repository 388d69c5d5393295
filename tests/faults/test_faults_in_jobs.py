"""Tasks, the launcher and its guard are killed, raise, and run out of memory, each at a named step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fault_kinds
from fault_jobs import (
    Job,
    Training,
    assert_nothing_left,
    assert_nothing_runs,
    assert_recovered,
    assert_same,
    run,
    undisturbed,
)

pytestmark = pytest.mark.timeout(1800)

DATA = ("arrays", "pipeline", "dataset", "sequence")
WORKERS = {"one": 1, "mirrored": 1, "central_storage": 1, "multi_worker": 2}
MANY = ("--max-restarts", "30")
# Spares that are left over at the end have imported TensorFlow for nothing.
COLD = (*MANY, "--spares", "none")
IN_ONE_PROCESS = pytest.mark.soak(
    "test_backup_and_restore.py interrupts fits of this strategy in its own process"
)

Expected = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What a strategy ends with on a kind of data if nothing goes wrong; each strategy is started once."""

    def of(strategy: str, data: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(strategy)
        return undisturbed(folder, strategy, *({"data": kind} for kind in DATA))[DATA.index(data)]

    return of


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("one", marks=IN_ONE_PROCESS),
        pytest.param("mirrored", marks=IN_ONE_PROCESS),
        "multi_worker",
    ],
)
def test_a_kill_in_the_middle_of_an_epoch_with_each_kind_of_data(
    strategy: str, tmp_path: Path, expected: Expected
) -> None:
    """Four trainings of one program, and a kill in each of them, the first and the last worker in turns."""
    last = f"worker:{WORKERS[strategy] - 1}"
    victims = ["worker:0", last, "worker:0", last]
    trainings = [
        Training(
            tmp_path / data,
            {
                "strategy": strategy,
                "data": data,
                "faults": [{"kind": "SIGKILL", "step": 29 + number, "worker": victims[number]}],
            },
        )
        for number, data in enumerate(DATA)
    ]
    job = run(trainings, workers=WORKERS[strategy], options=MANY)
    assert job.text.count("All are started again") == len(DATA), job.text
    for training, data in zip(trainings, DATA, strict=True):
        assert_same(training, expected(strategy, data))
        assert_recovered(job, training, 0)
        assert_nothing_left(training)
        # The trainings that were complete when a later one was killed were not made again.
        assert len({pid for pid, _, _ in training.steps()}) == 2


@IN_ONE_PROCESS
def test_central_storage_goes_on_after_a_kill(tmp_path: Path) -> None:
    (expected,) = undisturbed(tmp_path / "undisturbed", "central_storage", {})
    faults = [{"kind": "SIGKILL", "step": 29}]
    training = Training(tmp_path / "job", {"strategy": "central_storage", "faults": faults})
    job = run([training], options=MANY)
    assert_same(training, expected)
    assert_recovered(job, training, 0)
    assert_nothing_left(training)


@pytest.mark.usefixtures("as_installed")
def test_each_task_two_at_once_the_guard_and_the_launcher_are_killed(
    tmp_path: Path, expected: Expected
) -> None:
    faults = [
        {"kind": "SIGKILL", "step": 10, "worker": "worker:0"},
        {"kind": "SIGKILL", "step": 20, "worker": "worker:1"},
        {"kind": "SIGKILL", "step": 30, "worker": "worker:0"},
        {"kind": "SIGKILL", "step": 30, "worker": "worker:1"},
        {"kind": "SIGKILL", "step": 40, "target": "guard"},
        {"kind": "SIGKILL", "step": 45, "target": "launcher"},
    ]
    training = Training(tmp_path / "job", {"strategy": "multi_worker", "faults": faults})
    with Job([training], workers=2, options=MANY) as job:
        assert job.wait() == -signal.SIGKILL, job.text
    # The guard was dead: here it is the kernel that ends the tasks of a launcher that was killed.
    assert_nothing_runs([training])
    for number in (0, 1, 2):
        assert_recovered(job, training, number)
    before = len(training.steps())
    job = run([training], workers=2, options=MANY)
    assert "Training resumes in epoch" in job.text
    step = training.steps()[before][1]
    assert training.fault(5)["committed"] < step <= 45
    assert_same(training, expected("multi_worker", "arrays"))
    assert_nothing_left(training)


@pytest.mark.soak("kills test each kind of data, the next test an exception")
def test_an_exception_that_is_raised_once_costs_nothing(tmp_path: Path, expected: Expected) -> None:
    """In a callback, where batches are read, in a function of tf.data's, and after the training."""
    kinds = [
        ("arrays", {"kind": "exception", "step": 29, "worker": "worker:1", "text": "in a callback"}),
        ("sequence", {"kind": "data", "item": 30, "step": 30, "text": "in a PyDataset"}),
        ("dataset", {"kind": "data", "item": 30, "step": 30, "worker": "worker:1", "text": "in a map"}),
        ("pipeline", {"kind": "exception", "step": "after", "text": "after the training"}),
    ]
    trainings = [
        Training(tmp_path / data, {"strategy": "multi_worker", "data": data, "faults": [fault]})
        for data, fault in kinds
    ]
    job = run(trainings, workers=2, options=COLD)
    assert job.text.count("All are started again") == len(kinds), job.text
    for training, (data, fault) in zip(trainings, kinds, strict=True):
        assert fault["text"] in job.text
        assert_same(training, expected("multi_worker", data))
        assert_nothing_left(training)
        processes = 1 if fault["step"] == "after" else 2
        assert len({pid for pid, _, _ in training.steps()}) == processes, "it was trained again"
    assert_recovered(job, trainings[0], 0)


def test_an_exception_that_is_raised_always_ends_the_job_with_its_trace(tmp_path: Path) -> None:
    faults = [{"kind": "exception", "step": 29, "always": True, "text": "always"}]
    training = Training(tmp_path / "job", {"faults": faults})
    job = run([training], status=1, options=COLD)
    assert training.starts() == 2, job.text
    last = job.text[job.text.rindex("[dtrain] The last lines of worker 0:") :]
    assert "[worker 0] RuntimeError: always" in last
    assert 'fault_kinds.py", line' in last
    assert "It is the same error as before, at step 29, so the job is not started again." in last


@pytest.fixture
def small_group() -> Iterator[bool]:
    """Whether processes here may be put under limits by whose excess the system kills them."""
    possible = True
    try:
        (fault_kinds.CGROUPS / "dtrain-may-i").mkdir()
        (fault_kinds.CGROUPS / "dtrain-may-i").rmdir()
    except OSError:
        possible = False
    yield possible
    fault_kinds.leave_no_group()


def test_a_task_that_runs_out_of_memory(tmp_path: Path, expected: Expected, small_group: bool) -> None:
    """It gets no more from the system; and, where that can be arranged here, the system kills it."""
    faults = [{"kind": "memory", "step": 20}, {"kind": "killed_for_memory", "step": 40}]
    count = 2 if small_group else 1
    training = Training(tmp_path / "job", {"faults": faults[:count]})
    job = run([training], options=MANY)
    for number in range(count):
        assert_recovered(job, training, number)
    assert_same(training, expected("one", "arrays"))
    assert_nothing_left(training)
    if not small_group:
        pytest.skip(
            f"there is no memory controller in {fault_kinds.CGROUPS}: tried without the system's kill"
        )
    assert "worker 0 was killed by signal 9 (SIGKILL)" in job.text
