"""What the death of a task means, by the rules alone: no process is started."""

from __future__ import annotations

from typing import cast

import pytest

from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.launcher import Launcher
from dtrain.launch.job.policy import Policy
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.supervision.attempt import JobRecord
from dtrain.launch.supervision.connections import Connections
from dtrain.launch.supervision.membership import Membership
from dtrain.launch.supervision.parameter_servers import ParameterServerPolicy, ServerRestartRules
from dtrain.launch.supervision.reports import describe_exit, exit_status
from dtrain.launch.supervision.restart_rules import Budget, Failure, RestartRules
from dtrain.launch.supervision.running_tasks import JobOutcome
from dtrain.launch.supervision.spares import Spares
from dtrain.launch.supervision.synchronous import SynchronousPolicy
from dtrain.task.task_messages import Progress
from given_clock import GivenClock

CHIEF, WORKER, PS = Task("chief", 0), Task("worker", 1), Task("ps", 0)


def policy(restarts: int = 3) -> ParameterServerPolicy:
    spec = JobSpec(command=["true"], workers=2, ps=1)
    topologies = [Topology({"worker": ("127.0.0.1:4000", "127.0.0.1:4001")}, "worker", 1)]
    record, clock = JobRecord(Connections(4)), GivenClock()
    return ParameterServerPolicy(spec, record, topologies, clock, Budget(restarts, clock))


def test_without_parameter_servers_the_first_failure_ends_the_job() -> None:
    rules = Policy()
    assert [rules.on_exit(WORKER, code).action for code in (0, 1, -9)] == ["go on", "fail", "fail"]
    assert rules.on_start(WORKER, 1) == ""
    assert not rules.takes_requests


def test_the_end_of_the_chief_is_the_jobs() -> None:
    assert policy().on_exit(CHIEF, 0).action == "finish"
    assert policy().on_exit(CHIEF, 0).after > 0
    assert [policy().on_exit(CHIEF, code).action for code in (1, 2, -9)] == ["fail"] * 3


def test_servers_that_were_asked_to_end_change_nothing() -> None:
    assert [policy().on_exit(task, 0).action for task in (WORKER, PS)] == ["go on"] * 2


def test_a_parameter_server_takes_the_whole_job_with_it() -> None:
    assert [policy().on_exit(PS, code).action for code in (1, -9)] == ["fail"] * 2


def test_a_worker_is_started_again_after_growing_delays_until_the_budget_is_used_up() -> None:
    rules = policy(3)
    decisions = [rules.on_exit(WORKER, code) for code in (-9, 1, -15, -9)]
    assert [d.action for d in decisions] == ["restart", "restart", "restart", "fail"]
    assert [d.after for d in decisions[:3]] == [1.0, 2.0, 4.0]
    assert decisions[0].line == (
        "worker 1 was killed by signal 9 (SIGKILL); it is started again in 1 s "
        "(1 of at most 3 restarts in an hour)."
    )


def test_a_worker_that_was_called_wrongly_is_not_started_again() -> None:
    assert policy().on_exit(WORKER, 2).action == "fail"


def test_process_and_address_of_a_task_that_starts() -> None:
    assert policy().on_start(WORKER, 77) == "worker 1 started, process 77, 127.0.0.1:4001"


@pytest.mark.parametrize(("host", "places"), [("127.0.0.1", ("", "")), ("h2", (" on 127.0.0.1", " on h2"))])
def test_one_line_names_the_processes_of_all_workers(host: str, places: tuple[str, str]) -> None:
    spec, clock = JobSpec(command=["true"], workers=2), GivenClock()
    addresses = ("127.0.0.1:4000", f"{host}:4001")
    attempt = SynchronousPolicy(
        spec,
        JobRecord(Connections(2)),
        [Topology({"worker": addresses}, "worker", index) for index in range(2)],
        clock,
        [0, 1],
        Membership(2, 2, rejoin=60.0, clock=clock),
        Spares([], {}, 0, cast(Launcher, None)),
    )
    assert attempt.on_start(Task("worker", 0), 76) == ""
    line = f"Started: worker 0 (process 76{places[0]}), worker 1 (process 77{places[1]})."
    assert attempt.on_start(Task("worker", 1), 77) == line


def test_a_process_with_the_number_of_an_earlier_one_is_heard() -> None:
    """On another host, or in another container, the task's next process may have the same number."""
    attempt = policy()
    news = Progress(ONE, 12, 3, "step", done=3, train=True)
    attempt.on_start(ONE, 12)
    attempt.on_message(news)
    attempt.close()
    attempt.latest.clear()
    attempt.on_message(news)
    assert not attempt.latest, "what comes late of the earlier process is ignored"
    attempt.on_start(ONE, 12)
    attempt.on_message(news)
    assert attempt.step_of(ONE) == 3


def test_the_budget_is_of_any_hour() -> None:
    clock = GivenClock()
    budget = Budget(2, clock)
    assert (budget.take(), budget.take(), budget.take()) == (1.0, 2.0, None)
    clock.pass_by(3599)
    assert budget.take() is None
    clock.pass_by(2)
    assert (budget.take(), budget.take(), budget.take()) == (1.0, 2.0, None)


def test_the_delay_has_a_bound() -> None:
    budget = Budget(1000, GivenClock())
    assert max(budget.take() or 0.0 for _ in range(1000)) == 30.0


def test_no_budget() -> None:
    assert Budget(0).take() is None


@pytest.mark.parametrize(
    ("raised", "again"),
    [
        (["ValueError: x", "ValueError: x"], [True, False]),
        (["ValueError: x", "ValueError: y", "ValueError: x"], [True] * 3),
        ([None, None, None], [True] * 3),
    ],
)
def test_the_chiefs_exception_of_before_is_the_programs_own(
    raised: list[str | None], again: list[bool]
) -> None:
    rules = ServerRestartRules(Budget(100, GivenClock()))
    assert [rules.decide(Failure(CHIEF, 1, each)).again for each in raised] == again


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit status 0"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-200, "was killed by signal 200"),
    ],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


ONE, TWO = Task("worker", 1), Task("worker", 2)


def failures(*found: Failure, limit: int = 100) -> list[tuple[bool, float]]:
    rules = RestartRules(Budget(limit, GivenClock()))
    return [(judged.again, judged.delay) for judged in map(rules.decide, found)]


def killed(step: int | None, code: int = -9, task: Task = ONE) -> Failure:
    return Failure(task, code, step=step, progressed=step is not None, stepped=True)


def raised(step: int | None, line: str = "ValueError: x", task: Task = ONE) -> Failure:
    return Failure(task, 1, line, step, progressed=step is not None, stepped=True)


def test_after_progress_there_is_no_delay_and_without_it_growing_ones() -> None:
    found = failures(*[killed(None)] * 7, killed(3), killed(None), killed(None))
    assert [delay for _, delay in found] == [1, 2, 4, 8, 16, 30, 30, 0, 1, 2]
    assert all(again for again, _ in found)


@pytest.mark.parametrize(
    ("sequence", "again"),
    [
        ([killed(7, -11)] * 3, [True, True, False]),
        ([killed(7)] * 6, [*[True] * 5, False]),
        ([killed(7), killed(8), killed(7), killed(7)], [True] * 4),
        ([killed(7), killed(7, -11), killed(7)], [True] * 3),
        ([killed(7), killed(7, task=TWO), killed(7)], [True] * 3),
        ([killed(None)] * 9, [True] * 9),
        ([raised(7), raised(7)], [True, False]),
        ([raised(7), raised(9)], [True, True]),
        ([raised(7), raised(7, task=TWO), raised(7)], [True] * 3),
        ([raised(7), raised(7, "KeyError: 'a'"), raised(7)], [True] * 3),
        ([raised(None), raised(None)], [True, False]),
        ([Failure(ONE, 1, "ValueError: x")], [False]),
        ([Failure(ONE, 1, "PeerMissingError: x", lost_peer=True)] * 3, [True] * 3),
        ([Failure(ONE, 2, step=3, progressed=True, stepped=True)], [False]),
        ([Failure(ONE, -9)], [True]),
    ],
)
def test_when_another_try_is_of_no_use(sequence: list[Failure], again: list[bool]) -> None:
    assert [each for each, _ in failures(*sequence)] == again


def test_the_budget_bounds_restarts() -> None:
    assert [again for again, _ in failures(*[killed(n) for n in range(4)], limit=3)] == [*[True] * 3, False]


def test_a_failure_in_words() -> None:
    assert str(killed(7)) == "worker 1 was killed by signal 9 (SIGKILL) at step 7"
    assert str(raised(None)) == "worker 1 ended with exit status 1 before its first step"
    assert str(Failure(ONE, -9, step=3, reason="was stuck")) == "worker 1 was stuck at step 3"


def test_places_are_given_up_and_tried_again_after_growing_times() -> None:
    clock = GivenClock()
    members = Membership(1, 3, rejoin=60.0, clock=clock)
    assert members.present() == [0, 1, 2] and members.next_return() is None
    assert [members.failed_to_start(0), members.failed_to_start(0)] == [False, True]
    assert (members.give_up(0), members.present(), members.next_return()) == (60.0, [1, 2], 1060.0)
    assert members.readmit() == []
    clock.pass_by(60)
    assert members.readmit() == [0] and members.present() == [0, 1, 2]
    assert members.failed_to_start(0), "one try is enough for one that was absent"
    assert members.give_up(0) == 120.0
    clock.pass_by(120)
    assert members.readmit() == [0]
    members.works([0])
    assert [members.failed_to_start(0), members.failed_to_start(0)] == [False, True]
    assert members.give_up(0) == 60.0


def test_failures_to_start_count_one_after_another() -> None:
    members = Membership(1, 2, rejoin=60.0)
    assert not members.failed_to_start(1)
    members.works([1])
    assert not members.failed_to_start(1)
    assert members.failed_to_start(1)
    assert members.can_lose_one()
    members.give_up(1)
    assert not members.can_lose_one()


@pytest.mark.parametrize(
    ("codes", "signum", "status"),
    [
        ([75, 75], 15, 75),
        ([75, 75], 10, 75),
        ([75, 75], 2, 130),
        ([75, -9], 15, 143),
        ([0, 0], 15, 143),
        ([], 15, 143),
        ([0, 0], None, 0),
    ],
)
def test_the_launchers_own_status(codes: list[int], signum: int | None, status: int) -> None:
    ended = JobOutcome(exit_codes={Task("worker", i): c for i, c in enumerate(codes)}, signal=signum)
    assert exit_status(ended) == status
