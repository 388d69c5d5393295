"""What the exit of a worker means in a job with a quorum, and which such jobs are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dtrain.environments.topology import Task, Topology
from dtrain.errors import ConfigurationError
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.supervision.attempt import JobRecord
from dtrain.launch.supervision.connections import Connections
from dtrain.launch.supervision.quorum import QuorumPolicy
from dtrain.task.task_messages import Progress
from given_clock import GivenClock

COMMAND = [sys.executable, "train.py"]
WORKERS = [Task("worker", number) for number in range(3)]


class Watched:
    """The policy of a job of three workers and a quorum of two."""

    def __init__(self, **options: Any) -> None:
        self.clock = GivenClock()
        self.lost: list[tuple[int, bool]] = []
        jobs = {"worker": tuple(f"127.0.0.1:{port}" for port in (1001, 1002, 1003))}
        self.policy = QuorumPolicy(
            JobSpec(command=COMMAND, workers=3, quorum=2, **options),
            JobRecord(Connections(3, self.clock)),
            [Topology(jobs, "worker", number) for number in range(3)],
            self.clock,
            lambda worker, forever: self.lost.append((worker, forever)),
        )

    def steps(self, worker: int, pid: int = 1) -> None:
        report: dict[str, Any] = dict.fromkeys(Progress.__dataclass_fields__)
        report |= {"task": WORKERS[worker], "pid": pid, "step": 7, "done": 7, "phase": "step", "train": True}
        self.policy.on_message(Progress(**report))


def test_a_killed_worker_alone_is_started_again_and_told_how_it_failed() -> None:
    job = Watched()
    job.steps(1)
    decision = job.policy.on_exit(WORKERS[1], -9)
    assert (decision.action, decision.after) == ("restart", 0.0)
    assert decision.line == (
        "worker 1 was killed by signal 9 (SIGKILL) at step 7. It is started again, and joins the others."
    )
    assert job.lost == [(1, False)]
    again = job.policy.again(TaskCommand(WORKERS[1], COMMAND, {"DTRAIN_ATTEMPT": "0", "A": "b"}))
    assert again.env == {"DTRAIN_ATTEMPT": "1", "A": "b", "DTRAIN_LAST_FAILURE": "1000.000:7"}


def test_a_worker_that_fails_too_often_is_left_out_until_too_few_are_left() -> None:
    job = Watched()
    job.steps(0)
    actions = [job.policy.on_exit(WORKERS[1], -9) for _ in range(3)]
    assert [(action.action, action.after) for action in actions] == [
        ("restart", 1.0),
        ("restart", 2.0),
        ("go on", 0.0),
    ]
    assert job.lost[-1] == (1, True)
    assert actions[-1].line.endswith("It is not started again; 2 workers go on.")
    for _ in range(2):
        assert job.policy.on_exit(WORKERS[2], -9).action == "restart"
    last = job.policy.on_exit(WORKERS[2], -9)
    assert last.action == "fail" and "1 workers are no quorum of 2" in last.line


def test_without_the_first_worker_nobody_would_write_files() -> None:
    job = Watched(max_restarts=0)
    job.steps(0)
    decision = job.policy.on_exit(WORKERS[0], -9)
    assert decision.action == "fail" and "no other worker writes the files" in decision.line


def test_restarts_are_limited() -> None:
    job = Watched(max_restarts=1)
    job.steps(2)
    assert job.policy.on_exit(WORKERS[2], 1).action == "restart"
    job.steps(2, pid=2)
    assert job.policy.on_exit(WORKERS[2], 1).action == "go on"


def test_a_broken_program_or_call_ends_the_job() -> None:
    assert Watched().policy.on_exit(WORKERS[0], 1).action == "fail"
    assert Watched().policy.on_exit(WORKERS[0], 2).action == "fail"
    assert Watched().policy.on_exit(WORKERS[0], -9).action == "restart"


def test_who_has_ended_well_is_not_waited_for() -> None:
    job = Watched()
    assert job.policy.on_exit(WORKERS[0], 0).action == "go on"
    assert job.lost == [(0, True)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quorum": 4}, "quorum is 4, but the job has 3 workers"),
        ({"quorum": 0}, "quorum is 0"),
        ({"workers": 1, "quorum": 1}, "quorum is 1, not an integer of at least 2"),
        ({"launcher": "mpi"}, "the launcher is 'mpi'"),
        ({"launcher": "ray"}, "the launcher is 'ray'"),
        ({"launcher": "ssh"}, "the launcher is 'ssh'"),
        ({"ps": 1}, "ps is 1"),
        ({"min_workers": 2}, "min_workers is 2"),
        ({"spares": 1}, "spares is 1"),
        ({"hang_timeout": 9.0}, "hang_timeout is 9"),
        ({"devices_per_worker": 2}, "devices_per_worker is 2"),
    ],
)
def test_what_a_quorum_cannot_have_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        JobSpec(**{"command": COMMAND, "workers": 3, "quorum": 2, **options})
