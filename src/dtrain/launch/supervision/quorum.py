"""Jobs with a quorum: a worker that is lost is started again by itself, while the others train on.

The launcher holds the server of the rounds (`process_group/quorum_server.py`), and tells it which processes
have ended. `restarts` runs the only attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from dtrain.base.clock import Clock
from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.launcher import Assignment, Launcher
from dtrain.launch.job.policy import GO_ON, Decision
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_environment import worker_tasks
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.supervision.attempt import AttemptPolicy, JobRecord
from dtrain.launch.supervision.reports import describe_exit
from dtrain.launch.supervision.restart_rules import (
    USAGE,
    Budget,
    Failure,
    RestartDecision,
    RestartRules,
    back_off,
)
from dtrain.launch.supervision.restarts import RestartedJob
from dtrain.process_group.quorum_server import QuorumServer
from dtrain.process_group.secret import read_secret

MOST_RESTARTS = 10
"""The restarts of one worker within any hour, unless `max_restarts` says another number."""

_IN_VAIN = 3  # starts of a worker without a step, after which it is not started again


class QuorumPolicy(AttemptPolicy):
    """The attempt of a job with a quorum.

    - A worker exits with 0: the others continue.
    - A worker fails: it alone is started again. If it has failed too often, the others go on without it, as
      long as they are enough for the quorum, and it is not the first worker, which writes the files.
    - A worker was called wrongly, or fails before any worker has completed a step: the job has failed.

    Args:
        spec, record, topologies, clock: as for `AttemptPolicy`.
        lose: called with the number of a worker that has ended, and whether it is not started again.
    """

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        topologies: Sequence[Topology],
        clock: Clock,
        lose: Callable[[int, bool], None],
    ) -> None:
        super().__init__(spec, record, topologies, clock)
        self._lose = lose
        limit = MOST_RESTARTS if spec.max_restarts is None else spec.max_restarts
        self._budgets = {task: Budget(limit, clock) for task in self.addresses}
        self._in_vain = dict.fromkeys(self.addresses, 0)
        self._starts = dict.fromkeys(self.addresses, 0)
        self._left: dict[Task, str] = {}  # the workers that are not started again
        self._failed: dict[Task, str] = {}  # when and at which step each has failed last, for its next start

    def again(self, command: TaskCommand) -> TaskCommand:
        """The command with the number of the start, and how the worker failed."""
        self._starts[command.task] += 1
        own = {
            "DTRAIN_ATTEMPT": str(self._starts[command.task]),
            "DTRAIN_LAST_FAILURE": self._failed[command.task],
        }
        return dataclasses.replace(command, env={**command.env, **own})

    def decide_after_exit(self, task: Task, code: int) -> Decision:
        """Decide what a worker's exit means; see the class."""
        if code == 0:
            self._lose(task.index, True)
            return GO_ON
        if code == USAGE or (code > 0 and not self.record.stepped and not self.lost_peer(task)):
            return Decision("fail")
        step = self.step_of(task)
        self._failed[task] = f"{self.clock.unix():.3f}:{step or 0}"
        self._in_vain[task] = 0 if step is not None else self._in_vain[task] + 1
        latest = self.latest.pop(task, None)
        if latest is not None:
            self.record.gone.add((task, latest.pid))
        where = "before its first step" if step is None else f"at step {step}"
        how = f"{task} {describe_exit(code)} {where}"
        budget = self._budgets[task]
        if self._in_vain[task] < _IN_VAIN and budget.take() is not None:
            self._lose(task.index, False)
            delay = back_off(self._in_vain[task]) if self._in_vain[task] else 0.0
            line = f"{how}. It is started again{f' in {delay:g} s' if delay else ''}, and joins the others."
            return Decision("restart", after=delay, line=line)
        self._left[task] = how
        self._lose(task.index, True)
        if task.index == 0:
            line = f"{how}. It is not started again, and no other worker writes the files of the job."
            return Decision("fail", line=line)
        left = len(self.addresses) - len(self._left)
        if left < (self.spec.quorum or 1):
            line = f"{how}. It is not started again, and {left} workers are no quorum of {self.spec.quorum}."
            return Decision("fail", line=line)
        return Decision("go on", line=f"{how}. It is not started again; {left} workers go on.")


class QuorumJob(RestartedJob):
    """A job with a quorum. It has one attempt.

    Args:
        spec: the job.
        launcher: starts the tasks.
    """

    everyone = "The whole job is"

    def __init__(self, spec: JobSpec, launcher: Launcher) -> None:
        rules = RestartRules(Budget(0, launcher.session.clock))
        super().__init__(spec, launcher, spec.workers, rules)
        self._assigned: Sequence[Assignment] = ()
        self._server: QuorumServer | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Have the launcher assign the addresses, and serve the rounds."""
        secret = read_secret(self.session.secret())
        tasks = worker_tasks(self.spec.workers)
        with self.launcher.assign(tasks, self.common) as self._assigned:
            self._server = server = QuorumServer(
                secret,
                self.spec.workers,
                self.spec.quorum or 1,
                clock=self.session.clock,
                say=self.session.say,
            )
            try:
                yield
            finally:
                server.close()
                if server.report.rounds:
                    self.session.say(f"{server.report}.")

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[tuple[AttemptPolicy, Sequence[TaskCommand]]]:
        """The attempt."""
        server = self._server
        if server is None:
            raise RuntimeError("the job is not open")
        topologies = [assignment.topology for assignment in self._assigned]
        attempt = QuorumPolicy(
            self.spec,
            self.record,
            topologies,
            self.session.clock,
            lambda worker, forever: server.lose(worker, forever=forever),
        )
        commands = []
        for place, assignment in enumerate(self._assigned):
            own = {
                "DTRAIN_QUORUM": f"{self.spec.quorum}@{server.address}",
                "DTRAIN_JOB": self._name,
                "DTRAIN_ATTEMPT": str(number),
            }
            if self.spec.gpus:
                own["CUDA_VISIBLE_DEVICES"] = self.spec.gpus[place]
            commands.append(self.command(assignment, number, own))
        yield attempt, commands

    def decide(self, failure: Failure, attempt: AttemptPolicy) -> RestartDecision:
        """No other attempt follows: each worker was started again by itself."""
        return RestartDecision(False, 0.0, "")
