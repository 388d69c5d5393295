"""One command, once for each task of a job, on this machine: the way in for programs and the command line."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, TextIO

from dtrain.launch.limits import system_limits_told
from dtrain.launch.parameter_servers import ParameterServerJob
from dtrain.launch.reports import exit_status
from dtrain.launch.session import Session
from dtrain.launch.spec import JobSpec
from dtrain.launch.synchronous import SynchronousJob


@system_limits_told()
def launch_local(
    command: Sequence[str], *, stdout: TextIO | None = None, stderr: TextIO | None = None, **options: Any
) -> int:
    """Run a command as every task of a job on this machine, until all have ended.

    Every line of output is marked with its task. Without parameter servers the tasks are workers: when one
    fails, all are ended and started again as `restart_rules` says, with fewer workers where that is allowed
    and one does not come up. With them, a chief is started too, and its end is the job's; what the failure of
    another means says `parameter_servers`. All attempts of a job have one DTRAIN_JOB, and each its
    DTRAIN_ATTEMPT, from 0. The last lines of what failed are shown again. No process of the job, nor any that
    one started, is left when this returns.

    Args:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        stdout, stderr: where the marked lines go; by default this process's own streams.
        options: the other attributes of `JobSpec`, of which `workers` is needed.

    Returns:
        0 if the job ended well; the exit status of the first task that failed, 128 + the signal if one killed
        it; or 128 + the signal that this process was sent (130 for Ctrl-C), but 75 where every task answered
        it by saving a checkpoint, so that the job wants to be run again.

    Raises:
        ConfigurationError: as `JobSpec` says, or there are no free ports.
        MPIError: mpi4py or the starter is missing, or the starter failed.
    """
    spec = JobSpec(command=command, **options)
    session = Session(stdout=stdout, stderr=stderr, hears_tasks=True, notices=(signal.SIGUSR1,))
    job = ParameterServerJob(spec, session) if spec.ps else SynchronousJob(spec, session)
    with session.opened(), job:
        outcome = job.run()
    job.finish(outcome)
    return exit_status(outcome)
