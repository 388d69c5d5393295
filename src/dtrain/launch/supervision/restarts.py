"""Runs the attempts of one job, of either kind, until one succeeds or the rules allow no other.

`Job` runs the processes of an attempt; `restart_rules` judges failures. Loading a checkpoint is left to the
program, which finds DTRAIN_ATTEMPT above 0 when it is restarted.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dtrain.base import safe_files
from dtrain.environments.topology import Task
from dtrain.launch.job.launcher import Assignment, Launcher
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_environment import task_environment
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.supervision.attempt import AttemptPolicy, JobRecord
from dtrain.launch.supervision.connections import Connections
from dtrain.launch.supervision.reports import exit_status, report
from dtrain.launch.supervision.restart_rules import Failure, RestartDecision, RestartRules, back_off
from dtrain.launch.supervision.running_tasks import Job, JobOutcome
from dtrain.launch.supervision.spares import Spares
from dtrain.task.channel import RUN_AGAIN
from dtrain.task.task_messages import FailureNote

_NO_FILE = ("DataError", "FileNotFoundError", "NotADirectoryError", "NotFoundError")


class RestartedJob(ABC):
    """A job that is restarted after failures.

    Args:
        spec: the job.
        launcher: starts the tasks.
        tasks: the largest number of tasks that an attempt may have.
        rules: decide whether another attempt follows a failure.
    """

    everyone = "All are"
    """The subject of the line that announces a restart."""

    spares: Spares | None = None
    """The waiting processes that may become tasks, or None."""

    def __init__(self, spec: JobSpec, launcher: Launcher, tasks: int, rules: RestartRules) -> None:
        self.spec = spec
        self.launcher = launcher
        self.session = launcher.session
        self.record = JobRecord(Connections(tasks, self.session.clock))
        self.rules = rules
        self.common = task_environment(None, spec.devices_per_worker, spec.env)
        self._name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
        self._began = {"DTRAIN_JOB_BEGAN": f"{self.session.clock.unix():.3f}"}
        self._again_in_vain = 0
        self._hint = ""

    @abstractmethod
    def opened(self) -> AbstractContextManager[None]:
        """The context of `run`, inside the launcher's: it reserves what all attempts share."""

    @abstractmethod
    def attempt(self, number: int) -> AbstractContextManager[tuple[AttemptPolicy, Sequence[TaskCommand]]]:
        """The attempt with this number, from 0, and its tasks' commands; addresses are held while open."""

    def command(self, assigned: Assignment, number: int, own: Mapping[str, str] | None = None) -> TaskCommand:
        """The command and environment of one task in an attempt.

        Args:
            assigned: what the launcher has assigned to the task.
            number: the attempt's number, from 0.
            own: further variables that only this task gets.
        """
        topology = assigned.topology
        env = {**self.common, **self._began, "TF_CONFIG": topology.to_tf_config()}
        if self.spec.restarts or self.spec.ps:
            env |= {"DTRAIN_JOB": self._name, "DTRAIN_ATTEMPT": str(number)}
        return TaskCommand(topology.task, self.spec.command, {**env, **assigned.variables, **(own or {})})

    def run(self) -> JobOutcome:
        """Run attempts until no other follows, showing each failure; returns the last outcome."""
        number, delay = 0, 0.0
        while True:
            self.session.console.attempt = number
            self.record.states.attempt_begins()
            with self.attempt(number) as (attempt, commands):
                job = Job(commands, self.launcher, policy=attempt, spares=self.spares)
                attempt.find = job.handle
                outcome = job.run(after=delay)
            self._began["DTRAIN_LAST_FAILURE"] = f"{self.session.clock.unix():.3f}:{attempt.reached}"
            attempt.close()
            pause = self._next(outcome, attempt)
            if pause is None:
                return outcome
            number, delay = number + 1, pause

    def finish(self, outcome: JobOutcome) -> None:
        """Show a final hint and, after success, delete what tasks marked for removal.

        Call it when the launcher is closed, so that all messages of the tasks are there.
        """
        self.record.note_all(self.session.remaining_events())
        self.session.say(self._hint or self.record.connections.advice(outcome))
        if exit_status(outcome) == 0:
            remove_all(self.record.removals)

    def _next(self, outcome: JobOutcome, attempt: AttemptPolicy) -> float | None:
        """The seconds until another attempt, or None if there is none."""
        failed = outcome.first_failure
        if failed is None or outcome.signal is not None:
            self.show(report(outcome))
            return None
        note = attempt.failures.get(failed)
        self._hint = "" if note is None else note.hint or self._files_hint(note, attempt)
        code = outcome.exit_codes[failed]
        if code == RUN_AGAIN and self.spec.restarts:
            # Restart at once, but back off if attempts repeatedly end like this without completing a step.
            self._again_in_vain = 0 if attempt.progressed else self._again_in_vain + 1
            delay = back_off(self._again_in_vain - 1) if self._again_in_vain > 1 else 0.0
            line = f"{failed} has saved a checkpoint and wants to be run again. {self.everyone} started again"
            self.session.say(f"{line}{f' in {delay:g} s' if delay else ''}{self.from_where()}.")
            return delay
        exception = None if note is None or code < 0 else note.exception
        failure = self.failure(outcome, failed, exception, attempt)
        decision = self.decide(failure, attempt)
        if decision.again:
            self.session.say(f"{self.introduced(outcome, failure)}{decision.line}{self.from_where()}.")
            return decision.delay
        self.show(report(outcome))
        self.session.say(decision.line if self.spec.restarts else "")
        return None

    def _files_hint(self, note: FailureNote, attempt: AttemptPolicy) -> str:
        """What to do about a file that one of several hosts may lack; "" if that is not the reason."""
        host, kind = self.launcher.host(note.task), note.exception.partition(":")[0]
        if not host or attempt.progressed or kind.rpartition(".")[2] not in _NO_FILE:
            return ""
        return (
            f"{note.task} ran on {host}: {note.exception}. Does {host} have the files that the other hosts "
            "have, under the same paths? Data must be on all hosts, or on a file system that they share."
        )

    def failure(
        self, outcome: JobOutcome, task: Task, exception: str | None, attempt: AttemptPolicy
    ) -> Failure:
        """The description of an attempt's failure that the rules decide about."""
        return Failure(
            task,
            outcome.exit_codes[task],
            exception,
            attempt.step_of(task),
            attempt.progressed,
            self.record.stepped,
            outcome.reason,
            attempt.lost_peer(task),
        )

    def decide(self, failure: Failure, attempt: AttemptPolicy) -> RestartDecision:
        """Decide whether another attempt follows."""
        return self.rules.decide(failure, self.everyone)

    def introduced(self, outcome: JobOutcome, failure: Failure) -> str:
        """Show what failed; returns the start of the line that announces the restart, or ""."""
        self.show(report(outcome))
        return ""

    def from_where(self) -> str:
        """The end of the line that announces the restart: where training resumes; "" if not known here."""
        return ""

    def show(self, lines: Sequence[str]) -> None:
        """Write lines to standard error unchanged."""
        for line in lines:
            self.session.console.write_line(line, to="stderr")


def remove_all(paths: Sequence[str]) -> None:
    """Delete folders that tasks have marked for removal, and the parent of each if it is empty afterwards.

    Only absolute paths on this machine are deleted; URLs are skipped, and errors are ignored.
    """
    for path in dict.fromkeys(paths):
        if "://" not in path and Path(path).is_absolute():
            safe_files.remove(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(path).parent.rmdir()
