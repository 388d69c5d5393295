"""What the end of a task means in a job with parameter servers: with simulated tasks and time.

The limits are the shipped ones. What the chief itself notices is not tested here.
"""

from __future__ import annotations

import signal

import pytest

from dtrain.environments.topology import Task
from dtrain.task.task_messages import Request
from simulated_jobs import FOR_EVER, SimulatedJob, SimulatedTask, Steps, saves

INT, KILL, TERM, USR1 = signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1
CHIEF, SERVER = ("chief", 0), ("ps", 0)


def job_of(
    *,
    chief: float = 100.0,
    others: dict[tuple[str, int], list[tuple[float, int]]] | None = None,
    **options: object,
) -> SimulatedJob:
    """A job in which all tasks but the chief serve for ever, or as long as it is said.

    Args:
        chief: the seconds that the chief trains before it ends with 0.
        others: for each start of a task, after how many seconds and with what code it ends.
        options: those of `SimulatedJob`.
    """
    ends = {task: [*starts] for task, starts in (others or {}).items()}

    def program(task: SimulatedTask) -> Steps:
        assert task.task is not None
        mine = ends.get((task.task.job, task.task.index), [])
        if mine:
            seconds, code = mine.pop(0)
            yield seconds
            return code
        yield chief if task.task.job == "chief" else FOR_EVER
        return 0

    return SimulatedJob(program, ps=1, **options)  # type: ignore[arg-type]


def times(job: SimulatedJob, task: tuple[str, int]) -> list[float]:
    """When a task was started."""
    return [each.at for each in job.starts(*task)]


def test_the_end_of_the_chief_is_that_of_the_job() -> None:
    """The others have five seconds to end by themselves; then they are asked, and then killed."""
    job = job_of(chief=100.0)
    job.run()
    assert job.status == 0
    assert job.starts(*SERVER)[0].signals == [(105.0, TERM)]
    assert job.starts(*CHIEF)[0].signals == []


def test_what_is_deaf_at_the_end_is_killed() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[TERM] = None
        yield 100.0 if task.task == Task("chief", 0) else FOR_EVER

    job = SimulatedJob(program, ps=1)
    job.run()
    assert job.status == 0
    assert job.starts(*SERVER)[0].signals == [(105.0, TERM), (110.0, KILL)]


def test_a_worker_alone_is_started_again_after_growing_pauses_within_the_budget() -> None:
    deaths = [(10.0, -9), (10.0, 1), (10.0, -15)]
    job = job_of(others={("worker", 1): deaths})
    job.run()
    assert job.status == 0
    assert times(job, ("worker", 1)) == [0.0, 11.0, 23.0, 37.0]
    assert times(job, ("worker", 0)) == times(job, SERVER) == times(job, CHIEF) == [0.0]
    assert "worker 1 was killed by signal 9 (SIGKILL); it is started again in 1 s (1 of at most 3" in job.err


def test_with_the_budget_used_up_the_job_ends_two_seconds_later() -> None:
    job = job_of(chief=1000.0, others={("worker", 1): [(10.0, -9)] * 4})
    job.run()
    assert job.status == 137
    assert job.starts(*CHIEF)[0].signals == [(49.0, TERM)], "10 + 1 + 10 + 2 + 10 + 4 + 10, and 2"
    assert len(times(job, CHIEF)) == 1, "its restart would be one more"


@pytest.mark.parametrize(("left", "status"), [(1.9, 0), (2.1, 137)])
def test_a_chief_that_is_about_to_end_makes_a_failure_none(left: float, status: int) -> None:
    job = job_of(chief=10.0 + left, others={SERVER: [(10.0, -9)]}, max_restarts=0)
    job.run()
    assert job.status == status


def test_a_lost_server_takes_the_whole_job_with_it_and_all_are_started_again() -> None:
    job = job_of(chief=30.0, others={SERVER: [(10.0, -9)]})
    job.run()
    assert job.status == 0
    assert times(job, CHIEF) == times(job, SERVER) == times(job, ("worker", 0)) == [0.0, 13.0]
    assert "The whole job is started again in 1 s (1 of at most 3 restarts in an hour)" in job.err
    addresses = {each.address for each in job.starts(*SERVER)}
    assert len(addresses) == 1, "the same address in each attempt"


def test_the_chiefs_exception_of_before_ends_the_job() -> None:
    def program(task: SimulatedTask) -> Steps:
        if task.task != Task("chief", 0):
            yield FOR_EVER
        yield 20.0
        return task.raises("ValueError: x" if task.attempt else "ValueError: y")

    job = SimulatedJob(program, ps=1)
    job.run()
    assert (job.status, times(job, CHIEF)) == (1, [0.0, 21.0, 43.0])
    assert "It is the same exception as before" in job.err


@pytest.mark.parametrize("task", [CHIEF, ("worker", 0), SERVER])
def test_wrong_arguments_end_the_job(task: tuple[str, int]) -> None:
    job = job_of(others={task: [(1.0, 2)]})
    job.run()
    assert (job.status, len(job.log)) == (2, 4)


def test_servers_and_workers_that_were_shut_down_change_nothing() -> None:
    job = job_of(others={SERVER: [(99.0, 0)], ("worker", 0): [(98.0, 0)], ("worker", 1): [(97.0, 0)]})
    job.run()
    assert (job.status, job.now, job.err.count("started again")) == (0, 100.0, 0)


@pytest.mark.parametrize("of_this_process", [True, False])
def test_a_stuck_worker_is_killed_at_the_chiefs_request_but_no_later_process_of_it(
    of_this_process: bool,
) -> None:
    def program(task: SimulatedTask) -> Steps:
        if task.task != Task("chief", 0):
            yield FOR_EVER
        yield 10.0
        (worker,) = [each for each in job.handles if each.task == Task("worker", 1)]
        task.send(Request(Task("worker", 1), worker.pid + (not of_this_process), "it is stuck"))
        yield 20.0

    job = SimulatedJob(program, ps=1)
    job.run()
    assert times(job, ("worker", 1)) == ([0.0, 11.0] if of_this_process else [0.0])
    assert (", is killed: it is stuck" in job.err) == of_this_process


def test_a_launcher_that_can_start_no_single_task_ends_the_attempt() -> None:
    job = job_of(chief=30.0, others={("worker", 1): [(10.0, -9)]}, restarts_task=False)
    job.run()
    assert (job.status, times(job, CHIEF), times(job, ("worker", 0))) == (0, [0.0, 13.0], [0.0, 13.0])


@pytest.mark.parametrize(("signum", "chief_first"), [(TERM, True), (USR1, True), (INT, False)])
def test_a_chief_that_saves_has_its_servers_until_it_has_saved(signum: int, chief_first: bool) -> None:
    def program(task: SimulatedTask) -> Steps:
        if task.task == Task("chief", 0):
            task.on_signal[TERM] = lambda each: saves(each, 12.0)
            task.checkpoint(-1)
        yield FOR_EVER

    job = SimulatedJob(program, ps=1)
    job.receives(signum, at=10.0)
    job.run()
    others = [job.starts(*task)[0].signals for task in (SERVER, ("worker", 0), ("worker", 1))]
    assert others == [[(22.0, TERM)] if chief_first else [(10.0, INT)]] * 3
    assert job.status == (75 if chief_first else 130)


def test_a_chief_that_keeps_no_checkpoint_ends_with_the_others() -> None:
    job = job_of(chief=1000.0)
    job.receives(TERM, at=10.0)
    job.run()
    assert (job.status, {each.ended_at for each in job.log}) == (143, {10.0})


def test_a_worker_that_fails_in_the_pause_before_the_job_fails_changes_nothing() -> None:
    job = job_of(chief=1000.0, others={SERVER: [(10.0, -9)], ("worker", 0): [(11.0, 1)]}, max_restarts=0)
    job.run()
    assert (job.status, job.outcome.first_failure) == (137, Task("ps", 0))
