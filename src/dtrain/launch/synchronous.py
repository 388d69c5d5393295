"""Jobs in which every worker is needed: after a failure all are started again, from their last checkpoint.

It runs one attempt after another and says what it does; `attempt` judges while one runs, `restart_rules` and
`members` whether and with whom there is another.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dtrain.channel import RUN_AGAIN
from dtrain.launch.attempt import Attempt, JobRecord
from dtrain.launch.budget import Budget, back_off
from dtrain.launch.connections import Connections
from dtrain.launch.members import Members
from dtrain.launch.processes import Job, Outcome, TaskCommand
from dtrain.launch.reports import exception_in, report, trace
from dtrain.launch.restart_rules import USAGE, Failure, Judgement, RestartRules
from dtrain.launch.session import Session
from dtrain.launch.spares import Spares
from dtrain.launch.watchdog import Watchdog
from dtrain.topology import Topology, split_address

MakeCommands = Callable[[int, Sequence[int]], AbstractContextManager[Sequence[TaskCommand]]]
"""The tasks of an attempt, given its number from 0 and its workers' places; it keeps the ports while open."""


class SynchronousJob:
    """Runs the attempts of one job.

    Args:
        make_commands: what an attempt runs.
        members: the places of its workers.
        max_restarts: how many restarts any hour may see; 0 for none.
        hang_timeout: seconds without progress after which a job hangs; None to find out.
        grace: seconds between asking tasks to end and killing them.
        own_grace: the same, where the user has set it; otherwise tasks that keep checkpoints get longer.
        session: an open one.
        spares: the processes in waiting; they are closed by whoever made them.
        over_mpi: whether the workers are ranks of an MPI start.
    """

    def __init__(
        self,
        make_commands: MakeCommands,
        *,
        members: Members,
        max_restarts: int,
        hang_timeout: float | None,
        grace: float,
        own_grace: float | None,
        session: Session,
        spares: Spares,
        over_mpi: bool = False,
    ) -> None:
        self._make_commands = make_commands
        self._members = members
        self._restarts = max_restarts > 0
        self._rules = RestartRules(Budget(max_restarts))
        self._hang_timeout = hang_timeout
        self._grace = grace
        self._own_grace = own_grace
        self._session = session
        self._spares = spares
        self._over_mpi = over_mpi
        self._again_in_vain = 0
        self.record = JobRecord(Connections(members.most))

    def run(self) -> Outcome:
        """Run attempts until one succeeds or another is of no use; what failed in each has been shown."""
        number, delay = 0, 0.0
        while True:
            self._take_in_the_absent()
            outcome, attempt = self._attempt(number, delay)
            found = self._next(outcome, attempt)
            if found is None:
                return outcome
            number, delay = number + 1, found

    def _take_in_the_absent(self) -> None:
        for place in self._members.take_in():
            number = len(self._members.present())
            self._session.say(f"The absent worker (place {place}) is tried again: {number} workers.")

    def _attempt(self, number: int, delay: float) -> tuple[Outcome, Attempt]:
        places = self._members.present()
        self._spares.hold()
        attempt = Attempt(
            places,
            self.record,
            self._members,
            Watchdog(self._hang_timeout),
            self._spares,
            restarts=self._restarts,
            grace=self._own_grace,
            over_mpi=self._over_mpi,
        )
        with self._make_commands(number, places) as commands:
            job = Job(
                commands, grace=self._grace, policy=attempt, session=self._session, reserve=self._spares
            )
            attempt.look_up(job.process, [_port(spec) for spec in commands])
            outcome = job.run(after=delay)
        attempt.close()
        return outcome, attempt

    def _next(self, outcome: Outcome, attempt: Attempt) -> float | None:
        """After how many seconds there is another attempt; None if there is none."""
        failed = outcome.first_failure
        if failed is None or outcome.signal is not None:
            self._show(report(outcome))
            return None
        if outcome.exit_codes[failed] == RUN_AGAIN and self._restarts:
            # Once more at once; but a notice that comes in every attempt would keep us busy for nothing.
            self._again_in_vain = 0 if attempt.progressed else self._again_in_vain + 1
            delay = back_off(self._again_in_vain - 1) if self._again_in_vain > 1 else 0.0
            line = f"{failed} has saved a checkpoint and wants to be run again. All are started again"
            self._session.say(f"{line}{f' in {delay:g} s' if delay else ''}, {self._from_where()}.")
            return delay
        failure = self._failure(outcome, attempt)
        judgement = self._without(failure, attempt) or self._rules.judge(failure)
        if not judgement.again:
            self._show(report(outcome))
            self._session.say(judgement.line if self._restarts else "")
            return None
        self._show(trace(outcome))
        self._session.say(f"{failure}. {judgement.line}, {self._from_where()}.")
        return judgement.delay

    def _failure(self, outcome: Outcome, attempt: Attempt) -> Failure:
        if outcome.first_failure is None:
            raise RuntimeError("an attempt that has not failed has no failure")
        failed = outcome.first_failure
        return Failure(
            failed,
            outcome.exit_codes[failed],
            exception_in(outcome.tails[failed]),
            attempt.step_of(failed),
            attempt.progressed,
            self.record.stepped,
            outcome.reason,
        )

    def _without(self, failure: Failure, attempt: Attempt) -> Judgement | None:
        """Where a worker does not come up: that the job goes on without it, or cannot. Otherwise None."""
        broken = failure.code > 0 and not failure.stepped
        if failure.code in (0, USAGE) or broken or attempt.started(failure.task):
            return None
        members, place = self._members, attempt.places[failure.task.index]
        if not members.elastic:
            return None
        if not members.failed_to_start(place):
            # It costs the job's budget nothing: a second time, it is left out.
            delay = back_off(1)
            return Judgement(True, delay, f"It is tried once more: all are started again in {delay:g} s")
        if not members.can_lose_one():
            left = len(members.present()) - 1
            line = f"It does not come up, and without it {left} of at least {members.fewest} workers are left"
            return Judgement(False, 0.0, f"{line} (--workers {members.fewest}:{members.most}).")
        seconds = members.give_up(place)
        number = f"{len(members.present())} of {members.most} workers"
        later = f"the absent one (place {place}) is tried again after {seconds:g} s"
        return Judgement(True, 0.0, f"It does not come up: {later}. The job goes on with {number}")

    def _from_where(self) -> str:
        record = self.record
        if record.folder is None and not record.reported:
            return (
                "from the beginning: it has saved nothing yet, nor come to a step "
                "(checkpoints: dtrain.BackupAndRestore)"
            )
        if record.folder is None:
            return "from the beginning: the program keeps no checkpoints (dtrain.BackupAndRestore)"
        if record.checkpoint < 0:
            return f"from the beginning: there is no checkpoint in {record.folder} yet"
        checkpoint = f"from the checkpoint of step {record.checkpoint} in {record.folder}"
        if _is_gone(record.folder):
            return f"from the beginning, not {checkpoint}: the folder is gone"
        return checkpoint

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._session.console.write_line(line, to="stderr")


def _port(command: TaskCommand) -> int:
    topology = Topology.from_tf_config(command.env.get("TF_CONFIG"))
    return split_address(topology.address)[1] if topology is not None else 0


def _is_gone(folder: str) -> bool:
    """Whether a folder of this machine is not there any more."""
    return "://" not in folder and Path(folder).is_absolute() and not Path(folder).exists()


def remove_all(paths: Sequence[str]) -> None:
    """Delete what tasks have said nobody needs any more, and the folder around it where that is empty then.

    They are folders of this machine; what cannot be deleted, stays.
    """
    for path in dict.fromkeys(paths):
        if "://" not in path and Path(path).is_absolute():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(path).parent.rmdir()
