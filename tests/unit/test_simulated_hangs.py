"""When a job counts as hung, and what is done about it: the real engine, with simulated tasks and time.

The limits are the shipped ones. `test_watchdog` tests whom the watchdog names; here the job acts on it.
"""

from __future__ import annotations

import signal

import pytest

from dtrain.task.task_messages import ConnectedNote, RendezvousNote
from simulated_jobs import FOR_EVER, Program, SimulatedJob, SimulatedTask, Steps

KILL, TERM, USR2 = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2


def stuck_after(seconds: float, *, each: float) -> Program:
    """A program in which worker 1 gets stuck in a callback while worker 0 waits for it in a step."""

    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(seconds, each=each)
        if task.attempt == 0:
            last = round(seconds / each) + 1
            task.step(last, "callbacks" if task.index else "step", done=last, seconds=each)
            yield FOR_EVER

    return program


@pytest.mark.parametrize(
    ("hang_timeout", "each", "limit"),
    [(None, 1.0, 30.0), (None, 8.0, 80.0), (5.0, 1.0, 5.0), (100.0, 1.0, 100.0)],
)
def test_a_stuck_worker_is_found_its_stacks_are_shown_and_all_are_started_again(
    hang_timeout: float | None, each: float, limit: float
) -> None:
    job = SimulatedJob(stuck_after(40.0, each=each), hang_timeout=hang_timeout)
    job.run()
    assert job.status == 0
    for index in (0, 1):
        (dumped, killed) = job.starts("worker", index)[0].signals
        assert dumped == (40.0 + limit, USR2), "both dump their stacks"
        assert killed == (41.0 + limit, KILL), "and have a second for it"
    assert job.starts("worker", 0)[1].at == 41.0 + limit
    assert "worker 1 has made no progress for" in job.err
    assert "it is in a callback while the others wait for it" in job.err
    assert "worker 1 was stuck, and was killed at step" in job.err


def test_the_first_step_may_take_ten_minutes() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield 6.0
        if task.attempt == 0:
            task.step(0, "input" if task.index else "step", done=0)
            yield FOR_EVER
        yield from task.trains(3.0)

    job = SimulatedJob(program)
    job.run()
    assert job.starts("worker", 1)[0].signals == [(606.0, USR2), (607.0, KILL)]
    assert "worker 1 was stuck, and was killed before its first step." in job.err


def test_a_pause_after_which_the_job_went_on_is_allowed_twice_as_long() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(10.0)
        task.step(11, "checkpoint", done=11)
        yield 29.0
        task.step(12, done=12)
        if task.attempt == 0:
            yield FOR_EVER

    job = SimulatedJob(program)
    job.run()
    assert job.starts("worker", 0)[0].signals[0] == (10.0 + 29.0 + 2 * 29.0, USR2)


def test_only_tasks_that_have_reported_are_asked_for_their_stacks() -> None:
    """The signal would end the others, which have no handler for it."""

    def program(task: SimulatedTask) -> Steps:
        if task.index == 0:
            task.step(1)
        yield FOR_EVER

    job = SimulatedJob(program, max_restarts=0)
    job.run()
    assert [signum for _, signum in job.starts("worker", 1)[0].signals] == [KILL]
    assert [signum for _, signum in job.starts("worker", 0)[0].signals] == [USR2, KILL]


def test_a_hang_that_ends_while_stacks_are_shown_is_ended_nevertheless() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(10.0)
        if task.attempt == 0:
            task.step(11, "callbacks" if task.index else "step", done=11)
            yield 30.5
            task.step(12, done=12)
            yield FOR_EVER

    job = SimulatedJob(program)
    job.run()
    assert job.starts("worker", 1)[0].signals == [(40.0, USR2), (41.0, KILL)]


def test_a_task_that_ends_when_its_stacks_are_asked_for_is_not_to_blame() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[USR2] = lambda task: task.end(-USR2)
        yield from task.trains(10.0)
        if task.attempt == 0:
            task.step(11, "callbacks" if task.index else "step", done=11)
            yield FOR_EVER

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.starts("worker", 0)[1].at) == (0, 40.0)
    assert "worker 1 was stuck, and was killed at step 11. All are started again" in job.err


def stuck_and_stopped(seconds: float, dumped: list[float]) -> Program:
    """A program in which worker 1 gets stuck, and is stopped when its stacks are asked for.

    Args:
        seconds: how long it is stopped.
        dumped: gets the time at which it dumps its stacks.
    """

    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(10.0)
        if task.attempt == 0:
            task.step(11, "callbacks" if task.index else "step", done=11)
            task.on_signal[USR2] = lambda task: dumped.append(task.job.now) if task.index else None
            yield 29.5
            if task.index:
                task.stop()
                task.job.world.after(seconds + 0.5, task.go_on)
            yield FOR_EVER

    return program


def test_a_task_that_was_stopped_for_a_moment_dumps_its_stacks() -> None:
    dumped: list[float] = []
    job = SimulatedJob(stuck_and_stopped(1.5, dumped))
    job.run()
    ((_, asked), (killed_at, killed)) = job.starts("worker", 1)[0].signals
    assert (job.status, dumped, asked, killed) == (0, [41.5], USR2, KILL)
    assert 42.5 <= killed_at < 42.7, "a second after it has taken the signal"


def test_a_task_that_stays_stopped_is_killed_without_its_stacks() -> None:
    dumped: list[float] = []
    job = SimulatedJob(stuck_and_stopped(FOR_EVER, dumped))
    job.run()
    assert (job.status, dumped) == (0, [])
    assert job.starts("worker", 1)[0].signals == [(40.0, USR2), (45.0, KILL)]


def test_a_task_that_ends_well_when_its_stacks_are_asked_for_is_not_waited_for() -> None:
    def program(task: SimulatedTask) -> Steps:
        task.on_signal[USR2] = lambda task: task.end(0)
        yield from task.trains(10.0)
        if task.attempt == 0:
            task.step(11, "callbacks" if task.index else "step", done=11)
            if task.index:
                task.on_signal[USR2] = None
            yield FOR_EVER

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.starts("worker", 1)[0].signals) == (0, [(40.0, USR2), (41.0, KILL)])


def test_a_slow_worker_is_named_and_left_alone() -> None:
    def program(task: SimulatedTask) -> Steps:
        for step in range(1, 31):
            task.step(step, seconds=1.0, own=0.9 if task.index else 0.1)
            yield 1.0

    job = SimulatedJob(program)
    job.run()
    assert job.status == 0
    assert not any(each.signals for each in job.log)
    (line,) = job.err.splitlines()
    assert "worker 1 is slow, and the others wait for it" in line


def test_a_task_that_ends_before_it_has_met_the_others_ends_their_wait() -> None:
    def program(task: SimulatedTask) -> Steps:
        if task.index == 0:
            task.waits_for_peers()
            yield FOR_EVER
        yield 12.0

    job = SimulatedJob(program)
    job.run()
    assert job.status == 1
    assert job.starts("worker", 0)[0].ended_at == 12.0 or job.starts("worker", 0)[0].ended_at == 13.0
    assert "worker 1 failed: it ended with exit status 0 before it had met the other tasks" in job.err
    assert "It would end in the same way again, so the job is not started again." in job.err


@pytest.mark.parametrize("connected", [False, True])
def test_the_others_wait_half_a_minute_for_a_task_that_is_stopped(connected: bool) -> None:
    """Also if the launcher need not look any more whether the tasks have ever connected."""

    def program(task: SimulatedTask) -> Steps:
        if connected and task.index == 0:
            task.waits_for_peers(over=True)
        yield 2.0
        if task.attempt == 0 and task.index == 1:
            task.stop()
        yield 0.0
        task.waits_for_peers()
        if task.attempt == 0:
            yield FOR_EVER
        task.waits_for_peers(over=True)

    job = SimulatedJob(program)
    job.run()
    assert job.status == 0
    assert job.starts("worker", 1)[0].signals == [(32.0, KILL)]
    assert "worker 1 was stopped (SIGSTOP) while others waited 30 s for it before its first step." in job.err


def comes_late(seconds: float) -> tuple[Program, set[tuple[int, int]]]:
    """A program in which worker 1 makes its strategy so much later than worker 0; who has come."""
    arrived: set[tuple[int, int]] = set()

    def program(task: SimulatedTask) -> Steps:
        yield 2.0 + (seconds if task.index == 1 and task.attempt == 0 else 0.0)
        task.waits_for_peers()
        arrived.add((task.attempt, task.index))
        while not {(task.attempt, 0), (task.attempt, 1)} <= arrived:
            yield 1.0
        task.waits_for_peers(over=True)

    return program, arrived


@pytest.mark.parametrize(("start_timeout", "limit"), [(None, 600.0), (5.0, 5.0), (900.0, 900.0)])
@pytest.mark.parametrize("late", [50_000.0, FOR_EVER])
def test_a_task_that_does_not_come_to_the_others_is_restarted_and_stacks_are_shown(
    late: float, start_timeout: float | None, limit: float
) -> None:
    program, _ = comes_late(late)
    job = SimulatedJob(program, start_timeout=start_timeout, hang_timeout=1.0)
    job.run()
    assert job.status == 0
    for index in (0, 1):
        assert job.starts("worker", index)[0].signals == [(2.0 + limit, USR2), (3.0 + limit, KILL)]
        assert job.starts("worker", index)[1].at == 4.0 + limit
    assert "worker 1 had not met the other tasks after" in job.err
    assert "(--start-timeout), and was killed" in job.err


def test_a_task_may_come_late_to_the_others() -> None:
    """It may read data; the limit is on the launcher's clock, and begins when the others wait."""
    program, arrived = comes_late(599.0)
    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.attempts(), len(arrived)) == (0, [[0, 1]], 2)
    assert not any(each.signals for each in job.log)


def test_a_task_that_is_stuck_after_the_rendezvous_is_not_waited_for_without_end() -> None:
    """All have met, but one never connects its strategy to the others, which wait for it inside theirs."""

    def program(task: SimulatedTask) -> Steps:
        assert task.task is not None
        for over in (False, True):
            task.send(RendezvousNote(task.task, over))
            yield 1.0
        if task.attempt == 0:
            yield FOR_EVER
        task.send(ConnectedNote(task.task))
        yield from task.trains(3.0)

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1], [0, 1]])
    assert job.starts("worker", 1)[0].signals == [(600.0, USR2), (601.0, KILL)]
    assert "worker 0 had met the other tasks, but not made its strategy after" in job.err


def test_a_server_that_never_listens_is_not_waited_for_without_end() -> None:
    def program(task: SimulatedTask) -> Steps:
        assert task.task is not None
        yield 1.0
        task.serves = task.task.job == "worker" or (task.task.job == "ps" and task.attempt == 1)
        if task.task.job == "chief":
            task.waits_for_peers()
            yield FOR_EVER if task.attempt == 0 else 5.0
            task.waits_for_peers(over=True)
        else:
            yield FOR_EVER

    job = SimulatedJob(program, ps=1)
    job.run()
    assert job.status == 0
    assert job.starts("chief", 0)[0].signals == [(601.0, USR2), (602.0, KILL)]
    assert "ps 0 had not met the other tasks after" in job.err


def test_a_task_that_makes_a_second_strategy_may_wait_for_the_others() -> None:
    """Another worker evaluates meanwhile: the watchdog judges that, not the start."""

    def program(task: SimulatedTask) -> Steps:
        assert task.task is not None
        task.waits_for_peers(over=True)
        yield 2000.0 * (task.index == 1)
        task.waits_for_peers()
        yield 2000.0 * (task.index == 0)
        task.waits_for_peers(over=True)

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1]])


def test_a_launcher_that_stood_still_does_not_count_that_time_as_a_wait() -> None:
    def program(task: SimulatedTask) -> Steps:
        yield 2.0
        if task.index == 0:
            task.waits_for_peers()
            yield 1.0
            task.job.world.clock.pass_by(3600.0)
        else:
            yield 500.0
            task.waits_for_peers()
        yield 5.0
        task.waits_for_peers(over=True)

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1]])
    assert not any(each.signals for each in job.log)


def test_a_launcher_that_stood_still_blames_nobody() -> None:
    """As a laptop that sleeps: an hour passes at once, while no task could report."""

    def program(task: SimulatedTask) -> Steps:
        yield from task.trains(10.0)
        task.step(11, done=11)
        if task.index == 0:
            task.job.world.clock.pass_by(3600.0)
        yield 1.0
        yield from task.trains(10.0, first=12)

    job = SimulatedJob(program)
    job.run()
    assert (job.status, job.attempts()) == (0, [[0, 1]])
