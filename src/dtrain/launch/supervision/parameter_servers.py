"""Jobs with parameter servers: what each task's exit means, and which tasks are restarted.

`restarts` runs the attempts; the chief's program loads the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from dtrain.base.clock import Clock
from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.launcher import Assignment, Launcher
from dtrain.launch.job.policy import GO_ON, Decision
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_environment import worker_tasks
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.supervision.attempt import AttemptPolicy, JobRecord
from dtrain.launch.supervision.reports import describe_exit
from dtrain.launch.supervision.restart_rules import USAGE, Budget, Failure, RestartRules
from dtrain.launch.supervision.restarts import RestartedJob
from dtrain.launch.supervision.running_tasks import NOTICES, JobOutcome

LINGER = 5.0
"""Seconds that the other tasks have to end by themselves after the chief has succeeded, at most `grace`."""

CHIEF_FIRST = 2.0
"""Seconds that the chief has to exit with 0 after another task failed, so that the job still succeeds.

A chief that has finished shuts its workers and servers down, and one of them may exit with an error.
"""


class ParameterServerPolicy(AttemptPolicy):
    """One attempt of a job with a chief, workers and parameter servers.

    - The chief exits with 0: the job has succeeded, whatever the other tasks do.
    - A worker fails: it alone is restarted, as long as the budget lasts. If it was called with wrong
      arguments (status 2), the attempt has failed.
    - The chief or a parameter server fails: the attempt has failed. Only the chief holds the state of the
      program, and a parameter server's shard of the weights is lost with it.
    - A worker or parameter server exits with 0: nothing, because the chief has shut it down.
    - The launcher receives SIGTERM or SIGUSR1: if the chief writes checkpoints, it gets the signal first and
      saves one, because saving needs the servers. The other tasks get SIGTERM when the chief has ended.

    Args:
        spec, record, topologies, clock: as for `AttemptPolicy`.
        budget: the restarts of the job.
    """

    takes_requests = True

    def __init__(
        self,
        spec: JobSpec,
        record: JobRecord,
        topologies: Sequence[Topology],
        clock: Clock,
        budget: Budget,
    ) -> None:
        super().__init__(spec, record, topologies, clock)
        self._budget = budget

    def on_start(self, task: Task, pid: int) -> str:
        """A task was started; the returned line shows its process id and address to the user."""
        super().on_start(task, pid)
        return f"{task} started, process {pid}, {self.addresses[task]}"

    def signalled_first(self, signum: int, running: Sequence[Task]) -> Sequence[Task]:
        """The chief first if it saves a checkpoint on this signal, else all tasks at once."""
        chief = [task for task in running if task.job == "chief"]
        return chief if chief and self.answers_signals and signum in NOTICES else running

    def decide_after_exit(self, task: Task, code: int) -> Decision:
        """Decide what a task's exit means; see the class."""
        if code == 0:
            return Decision("finish", after=min(LINGER, self.grace())) if task.job == "chief" else GO_ON
        if task.job == "chief" or code == USAGE:
            return Decision("fail")
        delay = self._budget.take() if task.job == "worker" else None
        if delay is None:
            return Decision("fail", after=CHIEF_FIRST)
        line = f"{task} {describe_exit(code)}; it is started again in {delay:g} s ({self._budget})."
        return Decision("restart", after=delay, line=line)


class ServerRestartRules(RestartRules):
    """Stops the restarts when the chief raises the same exception as in the previous attempt.

    The program itself is then the cause, and would raise it in every attempt.
    """

    def hopeless(self, failure: Failure) -> str:
        """Why another attempt cannot succeed, or ""; see the class."""
        if failure.code == USAGE:
            return "It was called with wrong arguments"
        last = self.before[-1].exception if self.before else None
        same = failure.exception is not None and failure.exception == last
        return "It is the same exception as before" if same else ""


class ParameterServerJob(RestartedJob):
    """A job with a chief, workers and parameter servers. All attempts use the same addresses.

    Args:
        spec: the job.
        launcher: starts the tasks.
    """

    everyone = "The whole job is"

    def __init__(self, spec: JobSpec, launcher: Launcher) -> None:
        tasks = [Task("chief", 0), *worker_tasks(spec.workers), *(Task("ps", i) for i in range(spec.ps))]
        self._budget = Budget(spec.restarts, launcher.session.clock)
        super().__init__(spec, launcher, len(tasks), ServerRestartRules(self._budget))
        self._tasks = tasks
        self._assigned: Sequence[Assignment] = ()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Have the launcher assign the addresses."""
        with self.launcher.assign(self._tasks, self.common) as self._assigned:
            yield

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[tuple[AttemptPolicy, Sequence[TaskCommand]]]:
        """One attempt; the tasks and their addresses are the same in all attempts."""
        topologies = [assignment.topology for assignment in self._assigned]
        # A launcher that cannot start one task again has no restarts for a single worker.
        budget = self._budget if self.launcher.restarts_task else Budget(0, self.session.clock)
        attempt = ParameterServerPolicy(self.spec, self.record, topologies, self.session.clock, budget)
        yield attempt, [self.command(assignment, number) for assignment in self._assigned]

    def failure(
        self, outcome: JobOutcome, task: Task, exception: str | None, attempt: AttemptPolicy
    ) -> Failure:
        """How an attempt failed. Only an exception of the chief counts, and no step is compared."""
        return Failure(task, outcome.exit_codes[task], exception if task.job == "chief" else None)
