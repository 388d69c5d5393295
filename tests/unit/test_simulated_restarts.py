"""When a job of workers is started again, and after what time: the real engine, simulated tasks and time.

The limits are the shipped ones. What one real process does is not tested here.
"""

from __future__ import annotations

import itertools
import signal

import pytest

from simulated_jobs import FOR_EVER, SimulatedJob, SimulatedTask, Steps

KILL, TERM = signal.SIGKILL, signal.SIGTERM


def test_a_killed_worker_has_its_peers_killed_and_all_started_again_at_once() -> None:
    told = set()

    def program(task: SimulatedTask) -> Steps:
        told.add((task.attempt, task.env["DTRAIN_JOB_BEGAN"], task.env.get("DTRAIN_LAST_FAILURE")))
        yield 10.0
        if task.attempt == 0:
            task.checkpoint(48)
            task.step(57)
            yield 5.0
            if task.index == 1:
                task.end(-KILL)
            yield FOR_EVER
        task.step(57, done=9)

    job = SimulatedJob(program)
    job.run()
    assert job.status == 0
    assert job.attempts() == [[0, 1], [0, 1]]
    peer, restarted = job.starts("worker", 0)
    assert peer.signals == [(15.0, KILL)], "it is not asked to end: it cannot go on alone"
    assert restarted.at == 15.0
    (line,) = job.err.splitlines()
    assert line.startswith(
        "[dtrain] worker 1 was killed by signal 9 (SIGKILL) at step 57. All are started again (1 of at most "
        "3 restarts in an hour), from the beginning, not from the checkpoint of step 48 in /folder: the"
    )
    first, second = ({each.address for each in job.log if each.attempt == number} for number in (0, 1))
    assert len(first) == len(second) == 2 and not first & second, "new addresses in each attempt"
    assert len({each.name for each in job.log}) == 1, "one name for all attempts"
    began = job.world.clock.at - job.now
    assert told == {(0, f"{began:.3f}", None), (1, f"{began:.3f}", f"{began + 15.0:.3f}:57")}


def test_without_progress_the_pauses_grow_through_nineteen_restarts() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield 2.0
        if task.attempt < 19 and task.index == 0:
            task.end(-KILL)
        yield 1.0

    job = SimulatedJob(program, max_restarts=100)
    job.run()
    starts = [each.at for each in job.starts("worker", 0)]
    pauses = [later - earlier - 2.0 for earlier, later in itertools.pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 16, *[30] * 14]
    assert (job.status, len(starts)) == (0, 20)
    assert "in 16 s (5 of at most 100 restarts in an hour)" in job.err


def test_the_restarts_of_an_hour_are_limited_and_those_of_a_day_are_not() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(1300.0 if task.attempt < 8 else 10.0, first=1000 * task.attempt)
        if task.index == 1:
            task.end(-KILL)
        yield FOR_EVER

    job = SimulatedJob(program)
    job.run()
    assert job.status == 128 + KILL
    assert [each.at for each in job.starts("worker", 0)] == [*range(0, 10401, 1300)]
    assert "it has had 3 of at most 3 restarts in an hour (--max-restarts)" in job.err.splitlines()[-1]


@pytest.mark.parametrize(("after", "blamed"), [(0.0, 1), (0.4, 1), (0.6, 0), (FOR_EVER, 0)])
def test_half_a_second_is_left_for_the_failure_behind_that_of_a_task_that_lost_its_peer(
    after: float, blamed: int
) -> None:
    def program(task: SimulatedTask) -> Steps:
        task.step(5 + task.attempt)
        yield 3.0
        if task.attempt == 0 and task.index == 0:
            return task.raises("UnavailableError: aborted", lost_peer=True)
        if task.attempt == 0:
            yield after
            return task.raises("KeyError: 'the cause'")
        return 0

    job = SimulatedJob(program)
    job.run()
    assert job.status == 0
    assert f"worker {blamed} ended with exit status 1 at step 5. All are started again (1" in job.err
    assert f"The last lines of worker {blamed}:" in job.err
    assert job.starts("worker", 0)[1].at == 3.0 + (min(after, 0.5))


@pytest.mark.parametrize("own_error", [False, True])
def test_workers_that_cannot_be_connected_at_the_first_start_are_started_again(own_error: bool) -> None:
    """No step was ever made, but the program is not the cause; an error of one's own is not tried again."""

    def program(task: SimulatedTask) -> Steps:
        task.waits_for_peers()
        yield 60.0 + 0.1 * task.index
        if task.attempt == 0:
            words = "PeerMissingError: The workers live, but could not be connected"
            if own_error and task.index == 1:
                return task.raises("KeyError: 'the cause'")
            return task.raises(words, lost_peer=True)
        task.waits_for_peers(over=True)
        yield from task.trains(3.0)

    job = SimulatedJob(program)
    job.run()
    assert job.status == (1 if own_error else 0)
    assert len(job.attempts()) == (1 if own_error else 2)
    assert f"worker {int(own_error)}" in job.err
    assert ("No step was ever completed before this error" in job.err) == own_error


def test_a_further_task_that_lost_its_peer_is_not_to_blame_either() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.step(5)
        yield 3.0 + 0.1 * task.index
        if task.attempt == 0 and task.index < 2:
            return task.raises("UnavailableError: aborted", lost_peer=True)
        if task.attempt == 0:
            yield FOR_EVER
        return 0

    job = SimulatedJob(program, workers=3)
    job.run()
    assert "worker 0 ended with exit status 1 at step 5. All are started again" in job.err
    assert job.starts("worker", 0)[1].at == 3.1, "a second failure decides, and nothing waits longer"


@pytest.mark.parametrize("silent", [True, False])
def test_a_task_without_a_message_lost_its_peer_only_where_libraries_end_processes(silent: bool) -> None:
    def program(task: SimulatedTask) -> Steps:
        task.step(5)
        yield 3.0 + 0.2 * task.index
        if task.attempt == 0:
            task.end(1 if task.index == 0 else -signal.SIGSEGV)
        return 0

    job = SimulatedJob(program, silent_failures=silent)
    job.run()
    blamed = "worker 1 was killed by signal 11" if silent else "worker 0 ended with exit status 1"
    assert blamed in job.err.splitlines()[0]


@pytest.mark.parametrize("stopped_for", [0.3, 3.0])
def test_a_peer_that_is_stopped_for_a_moment_is_not_to_blame(stopped_for: float) -> None:
    """Not if it runs again soon, and not for a failure that has nothing to do with a peer."""

    def program(task: SimulatedTask) -> Steps:
        task.step(5)
        yield 3.0
        if task.attempt == 0 and task.index == 1:
            task.stop()
            task.job.world.after(stopped_for, task.go_on)
        yield 0.1
        if task.attempt == 0 and task.index == 0:
            return task.raises("UnavailableError: aborted", lost_peer=stopped_for < 0.5)
        yield 10.0
        return 0

    job = SimulatedJob(program)
    job.run()
    assert job.status == 0
    assert "worker 0 ended with exit status 1 at step 5. All are started again" in job.err


def test_a_stopped_peer_is_to_blame_for_a_failure() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.step(5)
        yield 3.0
        if task.attempt == 0 and task.index == 1:
            task.stop()
        yield 8.0
        return task.raises("OSError: Connection reset", lost_peer=True) if task.attempt == 0 else 0

    job = SimulatedJob(program)
    job.run()
    assert job.status == 0
    assert "worker 1 is stopped (SIGSTOP): worker 0 failed because of it." in job.err
    assert "worker 1 was stopped, and was killed at step 5. All are started again" in job.err
    assert job.starts("worker", 1)[0].signals == [(11.5, KILL)]


def test_exits_are_judged_in_the_order_in_which_they_happened() -> None:
    """The launcher hears of the first one last, as when its thread for that task did not run for a while."""

    def program(task: SimulatedTask) -> Steps:
        task.step(5)
        yield 3.0 + task.index
        if task.attempt == 0:
            task.heard_after = 5.0 if task.index == 0 else 0.0
            task.end(-signal.SIGSEGV if task.index == 0 else -signal.SIGABRT)
        return 0

    job = SimulatedJob(program)
    job.run()
    assert "worker 0 was killed by signal 11 (SIGSEGV) at step 5" in job.err.splitlines()[0]
    assert job.starts("worker", 0)[1].at == 8.0


@pytest.mark.parametrize(
    ("code", "stepped", "options", "status"),
    [(2, True, {}, 2), (3, False, {}, 3), (-9, True, {"max_restarts": 0}, 137)],
)
def test_where_no_restart_follows_the_peers_are_asked_to_end_and_killed_after_the_grace(
    code: int, stepped: bool, options: dict[str, int], status: int
) -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[TERM] = None
        if stepped:
            task.step(1)
        yield 4.0
        if task.index == 1:
            task.end(code)
        yield FOR_EVER

    job = SimulatedJob(program, **options)
    job.run()
    assert job.status == status
    assert job.attempts() == [[0, 1]]
    assert job.starts("worker", 0)[0].signals == [(4.0, TERM), (9.0, KILL)]


@pytest.mark.parametrize(
    ("keeps_checkpoints", "grace", "until"), [(False, None, 5.0), (True, None, 30.0), (True, 7.0, 7.0)]
)
def test_tasks_that_save_have_half_a_minute_of_grace(
    keeps_checkpoints: bool, grace: float | None, until: float
) -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[TERM] = None
        if keeps_checkpoints:
            task.checkpoint(-1)
        yield 4.0
        if task.index == 1:
            task.end(3)
        yield FOR_EVER

    job = SimulatedJob(program, grace=grace)
    job.run()
    assert job.starts("worker", 0)[0].signals == [(4.0, TERM), (4.0 + until, KILL)]


def test_a_wish_to_be_run_again_is_no_failure() -> None:
    """The others get time to save and end as well; nothing counts, and nothing waits."""

    def program(task: SimulatedTask) -> Steps:
        task.step(task.attempt + 1)
        if task.attempt < 3:
            task.checkpoint(task.attempt)
            yield 1.0 + 20.0 * task.index
            return 75
        return 0

    job = SimulatedJob(program, max_restarts=1)
    job.run()
    assert job.status == 0
    assert [each.at for each in job.starts("worker", 0)] == [0.0, 21.0, 42.0, 63.0]
    assert not any(each.signals for each in job.log), "saving is not disturbed"
    assert job.err.count("has saved a checkpoint and wants to be run again") == 3


def test_a_peer_that_does_not_end_after_a_wish_to_be_run_again_is_killed_after_half_a_minute() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.step(1)
        yield 1.0
        if task.attempt == 0 and task.index == 0:
            return 75
        if task.attempt == 0:
            yield FOR_EVER
        return 0

    job = SimulatedJob(program)
    job.run()
    assert job.starts("worker", 1)[0].signals == [(31.0, KILL)]
    assert job.starts("worker", 0)[1].at == 31.0


def test_wishes_to_be_run_again_without_a_step_are_granted_ever_later() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield 1.0
        return 75 if task.attempt < 5 else 0

    job = SimulatedJob(program)
    job.run()
    starts = [each.at for each in job.starts("worker", 0)]
    assert [later - earlier - 1.0 for earlier, later in itertools.pairwise(starts)] == [
        0,
        1,
        2,
        4,
        8,
    ]


def test_a_worker_that_ends_well_leaves_the_others_alone() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(1.0 + 100.0 * task.index)

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.now, job.err) == (0, 101.0, "")
    assert not any(each.signals for each in job.log)


def test_a_refused_start_leaves_no_task() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.step(1)
        yield 2.0
        job.refused_starts = 1
        return -KILL if task.index else (yield FOR_EVER)

    job = SimulatedJob(program)
    with pytest.raises(OSError, match="temporarily unavailable"):
        job.run()
    assert [each.code for each in job.log] == [-KILL, -KILL]
