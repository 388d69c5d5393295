"""What the death of a task means, by the rules alone: no process is started."""

from __future__ import annotations

import pytest

from dtrain.launch.budget import Budget
from dtrain.launch.policy import Policy
from dtrain.launch.processes import Outcome
from dtrain.launch.reports import describe_exit
from dtrain.launch.supervisor import ParameterServerPolicy, exception_of_chief
from dtrain.topology import Task

CHIEF, WORKER, PS = Task("chief", 0), Task("worker", 1), Task("ps", 0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def policy(limit: int = 3) -> ParameterServerPolicy:
    return ParameterServerPolicy(Budget(limit, Clock()), {WORKER: "127.0.0.1:4001"})


def test_without_parameter_servers_the_first_failure_ends_the_job() -> None:
    rules = Policy()
    assert [rules.on_exit(WORKER, code).action for code in (0, 1, -9)] == ["go on", "fail", "fail"]
    assert rules.on_start(WORKER, 1) == ""
    assert not rules.takes_requests


def test_the_end_of_the_chief_is_the_jobs() -> None:
    assert policy().on_exit(CHIEF, 0).action == "finish"
    assert policy().on_exit(CHIEF, 0).after > 0
    assert [policy().on_exit(CHIEF, code).action for code in (1, 2, -9)] == ["fail"] * 3


def test_servers_that_are_told_to_end_change_nothing() -> None:
    assert [policy().on_exit(task, 0).action for task in (WORKER, PS)] == ["go on"] * 2


def test_a_parameter_server_takes_the_whole_job_with_it() -> None:
    assert [policy().on_exit(PS, code).action for code in (1, -9)] == ["fail"] * 2


def test_a_worker_is_started_again_after_growing_delays_until_the_budget_is_used_up() -> None:
    rules = policy(limit=3)
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


def test_the_budget_is_of_any_hour() -> None:
    clock = Clock()
    budget = Budget(2, clock)
    assert (budget.take(), budget.take(), budget.take()) == (1.0, 2.0, None)
    clock.now += 3599
    assert budget.take() is None
    clock.now += 2
    assert (budget.take(), budget.take(), budget.take()) == (1.0, 2.0, None)


def test_the_delay_has_a_bound() -> None:
    budget = Budget(1000, Clock())
    assert max(budget.take() or 0.0 for _ in range(1000)) == 30.0


def test_no_budget() -> None:
    assert Budget(0).take() is None


def outcome(code: int, *tail: str, task: Task = CHIEF) -> Outcome:
    return Outcome(exit_codes={task: code}, first_failure=task, tails={task: list(tail)})


TRACE = [
    "some progress",
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "    f(x)",
]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*TRACE, "ValueError: no such thing"], "ValueError: no such thing"),
        ([*TRACE, "KeyboardInterrupt"], "KeyboardInterrupt"),
        (
            [*TRACE, "    ^^^^", "dtrain.errors.DataError: short", "Hint: more"],
            "dtrain.errors.DataError: short",
        ),
        ([*TRACE, "ValueError: x", "E0000 00:00:17 context.cc:9] removed"], "ValueError: x"),
        (["Epoch 1", "    loss 0.5", "weights were saved"], None),
        (["ValueError: printed by the program itself"], None),
        ([], None),
    ],
)
def test_the_exception_that_ended_the_chief(lines: list[str], expected: str | None) -> None:
    assert exception_of_chief(outcome(1, *lines)) == expected


def test_only_the_chiefs_own_exception_counts() -> None:
    trace = [*TRACE, "ValueError: x"]
    assert exception_of_chief(outcome(-9, *trace)) is None
    assert exception_of_chief(outcome(1, *trace, task=PS)) is None
    assert exception_of_chief(Outcome()) is None


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
