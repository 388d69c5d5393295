"""Jobs with parameter servers: which task's death means what, and what is started again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from dtrain.launch.attempt import Attempt, JobRecord
from dtrain.launch.environment import local_topologies, worker_tasks
from dtrain.launch.policy import GO_ON, Decision
from dtrain.launch.ports import reserve_ports
from dtrain.launch.processes import Outcome, TaskCommand
from dtrain.launch.reports import NOTICES, describe_exit
from dtrain.launch.restart_rules import USAGE, Budget, Failure, RestartRules
from dtrain.launch.restarts import RestartedJob
from dtrain.launch.session import Session
from dtrain.launch.spec import JobSpec
from dtrain.topology import Task, Topology

LINGER = 5.0
"""Seconds that servers have to end by themselves once the chief has ended well."""

CHIEF_FIRST = 2.0
"""Seconds in which a chief that has told its servers to end can end well, though one of them did not."""


class ParameterServerAttempt(Attempt):
    """One attempt of a job with a chief, workers and parameter servers.

    - The chief ends with 0: the job has succeeded, whatever becomes of the others.
    - A worker fails: it is started again alone, as long as the budget lasts.
    - The chief or a parameter server fails: the attempt has failed. The chief alone knows where the program
      is, and a parameter server takes its part of the weights with it.
    - A worker or parameter server ends with 0: the chief has told it to.
    - The launcher is told that its time is over: a chief that keeps checkpoints saves one, for which it needs
      its servers, and then all end.

    Args:
        spec, record, topologies: as for `Attempt`.
        budget: the restarts of the job.
    """

    takes_requests = True

    def __init__(
        self, spec: JobSpec, record: JobRecord, topologies: Sequence[Topology], budget: Budget
    ) -> None:
        super().__init__(spec, record, topologies)
        self._budget = budget

    def on_start(self, task: Task, pid: int) -> str:
        """Process and address, which those who operate the job need."""
        super().on_start(task, pid)
        return f"{task} started, process {pid}, {self.addresses[task]}"

    def heeds(self, signum: int, running: Sequence[Task]) -> Sequence[Task]:
        """As the class says."""
        chief = [task for task in running if task.job == "chief"]
        return chief if chief and self.answers_signals and signum in NOTICES else running

    def judge_exit(self, task: Task, code: int) -> Decision:
        """As the class says."""
        if code == 0:
            return Decision("finish", after=LINGER) if task.job == "chief" else GO_ON
        if task.job == "chief" or code == USAGE:
            return Decision("fail")
        delay = self._budget.take() if task.job == "worker" else None
        if delay is None:
            return Decision("fail", after=CHIEF_FIRST)
        line = f"{task} {describe_exit(code)}; it is started again in {delay:g} s ({self._budget})."
        return Decision("restart", after=delay, line=line)


class ServerRestartRules(RestartRules):
    """Another try is of no use where the chief raised the very exception of the attempt before.

    Then it is the program's own, and would be raised for ever.
    """

    def hopeless(self, failure: Failure) -> str:
        """As the class says."""
        if failure.code == USAGE:
            return "It was called wrongly"
        last = self.before[-1].exception if self.before else None
        same = failure.exception is not None and failure.exception == last
        return "It is the same exception as before" if same else ""


class ParameterServerJob(RestartedJob):
    """The attempts of a job with parameter servers; all have the same ports.

    Args:
        spec: the job.
        session: the launcher's.
    """

    everyone = "The whole job is"

    def __init__(self, spec: JobSpec, session: Session) -> None:
        tasks = [Task("chief", 0), *worker_tasks(spec.workers), *(Task("ps", i) for i in range(spec.ps))]
        self._budget = Budget(spec.restarts)
        super().__init__(spec, session, len(tasks), ServerRestartRules(self._budget))
        self._tasks = tasks
        self._topologies: list[Topology] = []

    def open(self) -> None:
        """Reserve the ports."""
        ports = self.resources.enter_context(reserve_ports(len(self._tasks)))
        self._topologies = local_topologies(self._tasks, ports)

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[tuple[Attempt, Sequence[TaskCommand]]]:
        """The same tasks again."""
        attempt = ParameterServerAttempt(self.spec, self.record, self._topologies, self._budget)
        yield attempt, [self.command(topology, number) for topology in self._topologies]

    def failure(self, outcome: Outcome, task: Task, exception: str | None, attempt: Attempt) -> Failure:
        """Only what the chief raised is the program's; where it was then says nothing."""
        return Failure(task, outcome.exit_codes[task], exception if task.job == "chief" else None)
