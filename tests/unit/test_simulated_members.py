"""When an elastic job goes on with fewer workers, and with more again: with simulated tasks and time.

When spares are started is tested here too. The limits are the shipped ones.
"""

from __future__ import annotations

import signal

import pytest

from simulated_jobs import FOR_EVER, SimulatedJob, SimulatedTask, Steps

KILL, USR1 = signal.SIGKILL, signal.SIGUSR1


def saves_on_request(task: SimulatedTask) -> None:
    """A handler of SIGUSR1: saves at once and asks to be run again."""
    task.end(75)


def elastic(task: SimulatedTask, *, absent: int, dies: bool, seconds: float = 10_000.0) -> Steps:
    """A worker of a job in which one place does not come up as long as `dies`."""
    task.on_signal[USR1] = saves_on_request
    if task.attempt == 0:
        yield from task.trains(5.0)
        if task.place == absent:
            task.end(-KILL)
        yield FOR_EVER
    if task.place == absent and dies:
        yield 1.0
        task.end(-KILL)
    task.checkpoint(5)
    yield from task.trains(seconds, first=6)


def test_a_worker_that_does_not_come_up_is_left_out_and_taken_in_again_after_growing_times() -> None:
    """It fails twice, then once at each later try, after 60 and 120 s; at the third it works."""

    def program(task: SimulatedTask) -> Steps:
        starts = len([each for each in task.job.log if each.place == 0])
        dies = task.place == 0 and 2 <= starts <= 4
        return elastic(task, absent=0, dies=dies, seconds=1000.0)

    job = SimulatedJob(program, workers=3, min_workers=2, max_restarts=1)
    job.run()
    assert job.status == 0
    whole = [0, 1, 2]
    assert job.attempts() == [whole, whole, whole, [1, 2], whole, [1, 2], whole]
    left_out = [each.at for each in job.starts("worker", 0) if each.place == 1]
    tried_again = [each.at for each in job.log if each.place == 0][3:]
    assert [again - left for left, again in zip(left_out, tried_again, strict=True)] == [60.0, 120.0]
    assert {each.task.index: each.place for each in job.log if each.attempt == 3} == {0: 1, 1: 2}
    assert "It does not start: the absent one (place 0) is tried again after 60 s." in job.err
    assert "The job continues with 2 of 3 workers, from the beginning, not from the checkpoint of" in job.err
    assert job.err.count("Tasks are asked to save and to end") == 2
    assert "The absent worker (place 0) is tried again: 3 workers." in job.err


def test_a_place_that_fails_at_first_is_tried_once_more_and_no_restart_is_counted() -> None:
    def program(task: SimulatedTask) -> Steps:
        return elastic(task, absent=1, dies=task.attempt == 1, seconds=10.0)

    job = SimulatedJob(program, workers=2, min_workers=1, max_restarts=1)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1]] * 3)
    assert [each.at for each in job.starts("worker", 0)] == [0.0, 5.0, 7.0]
    assert "It is tried once more: all are started again in 1 s" in job.err


@pytest.mark.parametrize("fewest", [1, 2])
def test_two_that_were_never_there(fewest: int) -> None:
    """With enough others left, the job goes on; with fewer, it says so and ends."""

    def program(task: SimulatedTask) -> Steps:
        yield 1.0 + task.place
        if task.place == 1 or (task.place == 2 and task.workers == 2):
            task.end(-KILL)
        if task.workers > 1:
            yield FOR_EVER
        task.step(1)

    job = SimulatedJob(program, workers=3, min_workers=fewest)
    job.run()
    whole, two = [0, 1, 2], [0, 2]
    if fewest == 1:
        assert (job.status, job.attempts()) == (0, [whole, whole, two, two, [0]])
    else:
        assert (job.status, job.attempts()) == (137, [whole, whole, two, two])
        assert job.err.splitlines()[-1].endswith("needs 2 workers, and 1 would be left (--workers 2:3).")


def test_tasks_that_keep_no_checkpoints_are_not_asked() -> None:
    """The signal would kill them: they have no handler."""

    def program(task: SimulatedTask) -> Steps:
        yield 1.0
        if task.place == 1:
            task.end(-KILL)
        yield from task.trains(300.0)

    job = SimulatedJob(program, min_workers=1)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1], [0, 1], [0]])
    assert [each.signals for each in job.log][-1] == []


def test_tasks_outside_of_fit_are_asked_when_they_train_again() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[USR1] = saves_on_request
        if task.place == 1 and task.attempt < 2:
            yield 1.0
            task.end(-KILL)
        task.checkpoint(5)
        yield from task.trains(10.0)
        task.step(11, "idle", done=11)
        yield 200.0
        yield from task.trains(5.0, first=11)

    job = SimulatedJob(program, min_workers=1)
    job.run()
    alone = job.log[4]
    assert (alone.attempt, alone.place) == (2, 0)
    assert alone.signals == [(alone.at + 210.0, USR1)], "60 s would have been over long before"


def test_a_worker_is_not_left_out_for_an_error_of_the_program() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield 1.0
        return task.raises("ValueError: broken") if task.place else (yield FOR_EVER)

    job = SimulatedJob(program, min_workers=1)
    job.run()
    assert (job.status, job.attempts()) == (1, [[0, 1]])


def test_thirty_seconds_without_news_count_as_a_start() -> None:
    """A program that reports nothing is not left out for a death after it."""

    def program(task: SimulatedTask) -> Steps:
        yield 29.0 if task.attempt == 0 else 31.0
        if task.attempt < 2 and task.place == 1:
            task.end(-KILL)
        yield 1.0

    job = SimulatedJob(program, min_workers=1)
    job.run()
    assert job.attempts() == [[0, 1]] * 3
    lines = [line for line in job.err.splitlines() if "worker 1 was killed" in line]
    assert "It is tried once more" in lines[0]
    assert "(1 of at most 3 restarts in an hour)" in lines[1]


def test_a_job_that_began_with_fewer_machines_grows_when_there_are_more() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[USR1] = saves_on_request
        task.checkpoint(1)
        yield from task.trains(50.0)

    job = SimulatedJob(program, workers=3, min_workers=1, room=2)
    job.grows(3, at=20.0)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1], [0, 1, 2]])
    assert job.starts("worker", 0)[1].at == 20.0
    assert "There is room for 2 of 3 workers: the job continues with 2." in job.err


def spare_times(job: SimulatedJob, at: list[float]) -> list[int]:
    """How many spares there are at certain times, as the job runs."""
    found: list[int] = []
    for moment in at:
        job.world.after(moment, lambda: found.append(len([s for s in job.spares if s.code is None])))
    job.run()
    return found


def test_spares_are_started_one_after_another_once_all_workers_train() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.imports()
        yield 4.0 + task.index
        yield from task.trains(20.0)

    job = SimulatedJob(program, has_spares=True, spares=9)
    assert spare_times(job, [4.9, 5.5, 6.9, 7.5, 15.0]) == [0, 1, 1, 2, 2], "one for each worker, 2 s each"
    assert all(spare.code == -KILL for spare in job.spares), "they end with the job"


def test_spares_are_started_after_half_a_minute_if_no_worker_reports_progress() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.imports()
        yield 60.0

    job = SimulatedJob(program, has_spares=True)
    assert spare_times(job, [29.0, 31.0, 50.0]) == [0, 1, 2]


def test_spares_become_the_tasks_of_the_next_attempt() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.imports()
        yield from task.trains(20.0, first=10 * task.attempt)
        if task.attempt < 2 and task.index == task.attempt:
            task.end(-KILL)
        yield FOR_EVER if task.attempt < 2 else 0.0

    job = SimulatedJob(program, has_spares=True)
    job.run()

    assert [each.warm for each in job.log] == [False, False, True, True, True, True]


def test_spares_that_die_are_replaced_until_three_have_died() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.imports()
        yield from task.trains(60.0)

    job = SimulatedJob(program, has_spares=True)
    job.spares_live = 1.0
    job.run()
    assert (job.status, len(job.spares)) == (0, 3)


def test_workers_that_differ_in_the_variables_of_their_imports_have_no_spares() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.imports(TF_SET=str(task.index))
        yield from task.trains(60.0)

    job = SimulatedJob(program, has_spares=True)
    job.run()
    assert (job.status, job.spares) == (0, [])
