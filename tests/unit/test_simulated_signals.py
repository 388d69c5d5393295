"""What signals to the launcher do to a job, and when tasks are killed: the real engine, with simulated tasks.

The limits are the shipped ones. That the process receives signals is tested with real ones.
"""

from __future__ import annotations

import signal

import pytest

from dtrain.launch.supervision.running_tasks import Job
from simulated_jobs import FOR_EVER, SimulatedJob, SimulatedTask, Steps, saves

INT, KILL, TERM, USR1 = signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1


def deaf(task: SimulatedTask) -> Steps:
    """A task that trains, and ignores all signals but SIGKILL."""
    task.on_signal |= {INT: None, TERM: None, signal.SIGHUP: None}
    yield from task.trains(1000.0)


def saving(task: SimulatedTask) -> Steps:
    """A task that saves a checkpoint in 20 s when it is asked to end."""
    task.on_signal[TERM] = lambda each: saves(each, 20.0)
    task.checkpoint(-1)
    yield from task.trains(1000.0)


@pytest.mark.parametrize(
    ("received", "passed_on", "status"),
    [(INT, INT, 130), (TERM, TERM, 143), (signal.SIGHUP, signal.SIGHUP, 129), (USR1, TERM, 138)],
)
def test_a_signal_is_passed_on_and_after_the_grace_follows_the_kill(
    received: int, passed_on: int, status: int
) -> None:
    job = SimulatedJob(deaf)
    job.receives(received, at=7.0)
    job.run()
    assert job.status == status
    assert [each.signals for each in job.log] == [[(7.0, passed_on), (12.0, KILL)]] * 2
    assert job.attempts() == [[0, 1]], "it is not started again"
    assert f"{signal.Signals(received).name} was received: every task was ended." in job.err


def test_closed_output_asks_the_tasks_to_end() -> None:
    job = SimulatedJob(deaf)
    job.receives(signal.SIGPIPE, at=7.0)
    job.receives(signal.SIGPIPE, at=7.1)
    job.run()
    assert [each.signals for each in job.log] == [[(7.0, TERM), (12.0, KILL)]] * 2


@pytest.mark.parametrize("pause", [0.0, 0.1, 3.0])
def test_a_second_interrupt_kills_at_once(pause: float) -> None:
    job = SimulatedJob(deaf)
    job.receives(INT, at=7.0)
    job.receives(INT, at=7.0 + pause)
    job.run()
    assert [each.signals for each in job.log] == [[(7.0, INT), (7.0 + pause, KILL)]] * 2
    assert job.status == 130


@pytest.mark.parametrize(("pause", "killed"), [(0.5, False), (1.9, False), (2.1, True)])
def test_notices_of_two_seconds_are_one(pause: float, killed: bool) -> None:
    """A scheduler may signal each host of a job, or each process of a host."""
    job = SimulatedJob(saving)
    job.receives(USR1, at=7.0)
    job.receives(TERM, at=7.0 + pause)
    job.run()
    assert job.status == (138 if killed else 75)
    assert job.log[0].ended_at == (7.0 + pause if killed else 27.0)


def test_all_that_save_are_waited_for() -> None:
    job = SimulatedJob(saving)
    job.receives(TERM, at=7.0)
    job.run()
    assert job.status == 75
    assert [each.signals for each in job.log] == [[(7.0, TERM)]] * 2
    assert (
        "SIGTERM was received: every task has saved a checkpoint; run the job again (status 75)." in job.err
    )


def test_one_that_does_not_save_makes_the_status_that_of_the_signal() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield from deaf(task) if task.index else saving(task)

    job = SimulatedJob(program)
    job.receives(TERM, at=7.0)
    job.run()
    assert job.status == 143
    assert job.starts("worker", 1)[0].signals == [(7.0, TERM), (37.0, KILL)]


def test_a_signal_does_not_disturb_tasks_that_save_by_themselves() -> None:
    """One asks to be run again, and the others are saving: a signal in between ends the job after them."""

    def program(task: SimulatedTask) -> Steps:
        task.checkpoint(-1)
        yield from task.trains(5.0)
        if task.index:
            task.step(6, "checkpoint")
            yield 20.0
        return 75

    job = SimulatedJob(program)
    job.receives(TERM, at=8.0)
    job.run()
    assert not any(each.signals for each in job.log)
    assert (job.status, job.now, job.attempts()) == (75, 25.0, [[0, 1]])


def test_a_signal_in_the_pause_before_a_restart_ends_the_job() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield 3.0
        return -KILL if task.index else (yield FOR_EVER)

    job = SimulatedJob(program)
    job.receives(INT, at=3.5)
    job.run()
    assert (job.status, job.attempts(), job.now) == (130, [[0, 1]], 3.5)


def test_a_signal_that_arrives_while_an_attempt_is_ended_is_not_lost() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(3.0)
        if task.index:
            task.end(-KILL)
            task.job.receives(INT, at=task.job.now)  # behind the exit, which has the peers killed
        yield FOR_EVER

    job = SimulatedJob(program)
    assert job.run().signal == INT
    assert job.attempts() == [[0, 1]], "it would have been started again"
    assert job.status == 128 + KILL, "the failure was first"


def test_a_job_that_takes_longer_than_it_may_is_ended() -> None:
    job = SimulatedJob(deaf, max_restarts=0)
    with job.opened() as (commands, launcher):
        outcome = Job(commands, launcher, timeout=40.0).run()
    assert [str(task) for task in outcome.timed_out] == ["worker 0", "worker 1"]
    assert [each.signals for each in job.log] == [[(40.0, TERM), (45.0, KILL)]] * 2
