"""Jobs with parameter servers: which task's death means what, and what is started again.

It counts, decides and says so; `processes` does what is decided. Where training goes on from is the business
of the program, which finds DTRAIN_ATTEMPT above 0 when it is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO

from dtrain.channel import RUN_AGAIN, CheckpointNote, Message, RemoveNote
from dtrain.launch.budget import Budget, back_off
from dtrain.launch.connections import Connections
from dtrain.launch.meeting import Meeting
from dtrain.launch.policy import GO_ON, Decision, Policy, saving_grace
from dtrain.launch.processes import Job, Outcome, TaskCommand
from dtrain.launch.reports import NOTICES, describe_exit, exception_in, report
from dtrain.launch.restart_rules import USAGE
from dtrain.launch.synchronous import remove_all
from dtrain.launch.task_process import TaskProcess
from dtrain.topology import Task, split_address

LINGER = 5.0
"""Seconds that servers have to end by themselves once the chief has ended well."""

CHIEF_FIRST = 2.0
"""Seconds in which a chief that has told its servers to end can end well, though one of them did not."""


class ParameterServerPolicy(Policy):
    """Of a job with a chief, workers and parameter servers.

    - The chief ends with 0: the job has succeeded, whatever becomes of the others.
    - A worker fails: it is started again alone, as long as the budget lasts.
    - The chief or a parameter server fails: the attempt has failed. The chief alone knows where the program
      is, and a parameter server takes its part of the weights with it.
    - A worker or parameter server ends with 0: the chief has told it to.
    - The launcher is told that its time is over: a chief that keeps checkpoints saves one, for which it needs
      its servers, and then all end.

    Args:
        budget: the restarts of the job.
        addresses: of every task, to be shown.
        grace: seconds given by the user, or None.

    Attributes:
        removals: what to delete when the job has ended well, as its tasks have said.
        connections: whether the tasks ever connected to each other.
    """

    takes_requests = True

    def __init__(self, budget: Budget, addresses: dict[Task, str], grace: float | None = None) -> None:
        self._budget = budget
        self._addresses = addresses
        self._grace = grace
        self._saves = False  # whether the chief does when it is told to end
        self._find: Callable[[Task], TaskProcess | None] = lambda task: None
        self.removals: list[str] = []
        self.connections = Connections(len(addresses))
        self._meeting = Meeting()

    def on_start(self, task: Task, pid: int) -> str:
        """Process and address, which those who operate the job need."""
        self._meeting.started(task)
        return f"{task} started, process {pid}, {self._addresses[task]}"

    def on_message(self, message: Message) -> None:
        """Take note of what is to be deleted, and of checkpoints."""
        if isinstance(message, RemoveNote):
            self.removals.append(message.path)
        elif isinstance(message, CheckpointNote):
            self._saves = True
        self._meeting.note(message)
        self.connections.note(message)

    def look_up(self, find: Callable[[Task], TaskProcess | None]) -> None:
        """Set how the process of a task is found."""
        self._find = find

    def next_check(self) -> float | None:
        """When to look whether the tasks are connected."""
        times = (self.connections.next_look(), self._meeting.next_check())
        return min((at for at in times if at is not None), default=None)

    def check(self) -> Decision:
        """Look whether they are."""
        ports = [split_address(address)[1] for address in self._addresses.values()]
        self.connections.look(map(self._find, self._addresses), ports)
        absence = self._meeting.absent(self._addresses, self._find)
        return GO_ON if absence is None else Decision("fail", task=absence.task, reason=absence.reason)

    def heeds(self, signum: int, running: Sequence[Task]) -> Sequence[Task]:
        """As the class says."""
        chief = [task for task in running if task.job == "chief"]
        return chief if chief and self._saves and signum in NOTICES else running

    def grace(self, usual: float) -> float:
        """The user's; or enough to save for a chief that keeps checkpoints."""
        return saving_grace(usual, self._grace, saves=self._saves)

    def on_exit(self, task: Task, code: int, tail: Sequence[str] = ()) -> Decision:
        """As the class says."""
        self._meeting.ended(task, code)
        if code == 0:
            return Decision("finish", after=LINGER) if task.job == "chief" else Decision("go on")
        if task.job == "chief" or code == USAGE:
            return Decision("fail")
        delay = self._budget.take() if task.job == "worker" else None
        if delay is None:
            return Decision("fail", after=CHIEF_FIRST)
        line = f"{task} {describe_exit(code)}; it is started again in {delay:g} s ({self._budget})."
        return Decision("restart", after=delay, line=line)


def supervise(
    make_commands: Callable[[int], Sequence[TaskCommand]],
    *,
    addresses: dict[Task, str],
    max_restarts: int,
    usual_grace: float,
    grace: float | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> Outcome:
    """Run a job with parameter servers until it succeeds, or until another attempt is of no use.

    After a failed attempt all processes are ended and all are started again, unless the budget is used up,
    the task that failed said that it was called wrongly (status 2), or the chief raised the very exception
    that it raised in the attempt before: then it is the program's own, and would be raised for ever.

    Args:
        make_commands: the tasks of an attempt, given its number from 0.
        addresses: of every task.
        max_restarts: how many restarts any hour may see, of workers and of the whole job together.
        usual_grace: as `grace` for `Job`, where the policy knows no better.
        grace: seconds given by the user, or None.
        stdout, stderr: as for `Job`.

    Returns:
        How the last attempt ended; what failed in each has been shown.
    """
    budget = Budget(max_restarts)
    attempt, delay = 0, 0.0
    raised: str | None = None
    notices = 0
    while True:
        policy = ParameterServerPolicy(budget, addresses, grace)
        job = Job(make_commands(attempt), grace=usual_grace, policy=policy, stdout=stdout, stderr=stderr)
        policy.look_up(job.process)
        outcome = job.run(after=delay)
        for line in report(outcome):
            job.console.write_line(line, to="stderr")
        if outcome.first_failure is None or outcome.signal is not None:
            if outcome.signal is None:
                remove_all(policy.removals)
            job.say(policy.connections.advice(outcome))
            return outcome
        before, raised = raised, exception_of_chief(outcome)
        again = None
        failed = outcome.first_failure
        if outcome.exit_codes[failed] == USAGE:
            verdict = "It was called wrongly, so it is not started again."
        elif outcome.exit_codes[failed] == RUN_AGAIN and max_restarts:
            # A notice that comes in every attempt would keep us busy for nothing.
            again = back_off(notices) if notices else 0.0
            notices += 1
            attempt, delay = attempt + 1, again
            verdict = (
                f"{failed} has saved a checkpoint and wants to be run again. The whole job is started again"
            )
            verdict += f" in {again:g} s." if again else "."
        elif raised is not None and raised == before:
            verdict = "It is the same exception as before, so the job is not started again."
        elif (again := budget.take()) is None:
            verdict = f"The job is not started again: it has had {budget} (--max-restarts)."
        else:
            attempt, delay = attempt + 1, again
            verdict = f"The whole job is started again in {delay:g} s ({budget})."
        job.say(verdict)
        if again is None:
            job.say(policy.connections.advice(outcome))
            return outcome


def exception_of_chief(outcome: Outcome) -> str | None:
    """The line that ends the Python traceback with which the chief failed; None where there is none."""
    failed = outcome.first_failure
    if failed is None or failed.job != "chief" or outcome.exit_codes[failed] < 0:
        return None
    return exception_in(outcome.tails[failed])
