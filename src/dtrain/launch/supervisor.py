"""Which task's death means what, and starting a job again: alone the task that failed, or everything.

It counts, decides and says so; `processes` does what is decided. Where training goes on from is the business
of the program, which finds DTRAIN_ATTEMPT above 0 when it is started again.
"""

from __future__ import annotations

import collections
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from dtrain.launch.policy import Decision, Policy
from dtrain.launch.processes import Job, Outcome, TaskCommand
from dtrain.topology import Task

MAX_RESTARTS = 3
"""How many restarts an hour a job has by default."""

USAGE = 2
"""The exit status of a command that was called wrongly; trying again cannot help."""

LINGER = 5.0
"""Seconds that servers have to end by themselves once the chief has ended well."""

CHIEF_FIRST = 2.0
"""Seconds in which a chief that has told its servers to end can end well, though one of them did not."""

_HOUR = 3600.0
_FIRST_DELAY = 1.0  # seconds before a restart
_LONGEST_DELAY = 30.0
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?::\s.*)?")


class Budget:
    """The restarts that a job may have: at most `limit` within any hour, of tasks and of the whole job alike.

    Args:
        limit: 0 allows none.
        clock: the time in seconds; for tests.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._taken: collections.deque[float] = collections.deque()

    def take(self) -> float | None:
        """Take one.

        Returns:
            Seconds to wait before the restart: 1, and twice as long for each that the last hour has seen, up
            to 30; None where the budget is used up.
        """
        now = self._clock()
        while self._taken and now - self._taken[0] > _HOUR:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return None
        self._taken.append(now)
        return float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (len(self._taken) - 1)))

    def __str__(self) -> str:
        return f"{len(self._taken)} of at most {self.limit} restarts in an hour"


class ParameterServerPolicy(Policy):
    """Of a job with a chief, workers and parameter servers.

    - The chief ends with 0: the job has succeeded, whatever becomes of the others.
    - A worker fails: it is started again alone, as long as the budget lasts.
    - The chief or a parameter server fails: the attempt has failed. The chief alone knows where the program
      is, and a parameter server takes its part of the weights with it.
    - A worker or parameter server ends with 0: the chief has told it to.

    Args:
        budget: the restarts of the job.
        addresses: of every task, to be shown.
    """

    takes_requests = True

    def __init__(self, budget: Budget, addresses: dict[Task, str]) -> None:
        self._budget = budget
        self._addresses = addresses

    def on_start(self, task: Task, pid: int) -> str:
        """Process and address, which those who operate the job need."""
        return f"{task} started, process {pid}, {self._addresses[task]}"

    def on_exit(self, task: Task, code: int) -> Decision:
        """As the class says."""
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
    grace: float,
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
        grace: as for `Job`.
        stdout, stderr: as for `Job`.

    Returns:
        How the last attempt ended; what failed in each has been shown.
    """
    budget = Budget(max_restarts)
    attempt, delay = 0, 0.0
    raised: str | None = None
    while True:
        policy = ParameterServerPolicy(budget, addresses)
        job = Job(make_commands(attempt), grace=grace, policy=policy, stdout=stdout, stderr=stderr)
        outcome = job.run(after=delay)
        for line in report(outcome):
            job.console.write_line(line, to="stderr")
        if outcome.first_failure is None or outcome.signal is not None:
            return outcome
        before, raised = raised, exception_of_chief(outcome)
        again = None
        if outcome.exit_codes[outcome.first_failure] == USAGE:
            verdict = "It was called wrongly, so it is not started again."
        elif raised is not None and raised == before:
            verdict = "It is the same exception as before, so the job is not started again."
        elif (again := budget.take()) is None:
            verdict = f"The job is not started again: it has had {budget} (--max-restarts)."
        else:
            attempt, delay = attempt + 1, again
            verdict = f"The whole job is started again in {delay:g} s ({budget})."
        job.console.write_line(f"[dtrain] {verdict}", to="stderr")
        if again is None:
            return outcome


def exception_of_chief(outcome: Outcome) -> str | None:
    """The line that ends the Python traceback with which the chief failed; None where there is none.

    It is sought from the end: TensorFlow may write more lines while the process ends.
    """
    failed = outcome.first_failure
    if failed is None or failed.job != "chief" or outcome.exit_codes[failed] < 0:
        return None
    lines = outcome.tails[failed]
    for before, line in zip(reversed(lines[:-1]), reversed(lines[1:]), strict=True):
        if before.startswith("    ") and _EXCEPTION.fullmatch(line):
            return line
    return None


def report(outcome: Outcome) -> list[str]:
    """What to tell the user of how a job ended, line by line; nothing where it ended well."""
    lines = []
    if outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        lines.append(f"[dtrain] {name} was received: every task was ended.")
    failed = outcome.first_failure
    if failed is not None:
        code, tail = outcome.exit_codes[failed], outcome.tails[failed]
        lines.append(f"[dtrain] {failed} failed: it {describe_exit(code)}.")
        if tail:
            lines.append(f"[dtrain] The last lines of {failed}:")
            lines.extend(f"[{failed}] {line}" for line in tail)
        lines.append(f"[dtrain] {failed} {describe_exit(code)}; the job was ended.")
    return lines


def exit_status(outcome: Outcome) -> int:
    """The status that a launcher should end with: the first failure's, or 128 + the signal it was sent."""
    if outcome.first_failure is not None:
        code = outcome.exit_codes[outcome.first_failure]
        return code if code >= 0 else 128 - code
    if outcome.signal is not None:
        return 128 + outcome.signal
    return 0


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
