"""Runs a command as every task of a job; programs and `dtrain launch` both enter here.

It only connects the parts: `restarts` runs the attempts, `running_tasks` runs the tasks.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import Any, TextIO

from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Launcher
from dtrain.launch.job.limits import convert_limit_errors
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_logs import kept_logs
from dtrain.launch.launchers import make_launcher
from dtrain.launch.supervision.parameter_servers import ParameterServerJob
from dtrain.launch.supervision.reports import exit_status
from dtrain.launch.supervision.restarts import RestartedJob
from dtrain.launch.supervision.synchronous import SynchronousJob
from dtrain.launch.supervision.task_states import TaskStates


@convert_limit_errors()
def launch_local(
    command: Sequence[str],
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    states: TaskStates | None = None,
    **options: Any,
) -> int:
    """Run a command as every task of a job, until all tasks have ended.

    The tasks run on this machine. With the launcher "nodes" they also run on the other machines of
    `JobSpec.nodes`, which join the job by `dtrain launch --nnodes`. With the launcher "ssh", or "mpi" if
    `JobSpec.hosts` is set, they run on those hosts. With "ray" they run where Ray places them.

    Each line of output is prefixed with its task. Without parameter servers, all tasks are workers: when one
    fails, all are ended and restarted under the rules of `restart_rules`, with fewer workers if the job
    allows it and a worker repeatedly fails before its first step. With parameter servers, the job also has a
    chief and succeeds when the chief does; `parameter_servers` says what the failure of a task means. With a
    quorum, a lost worker is started again by itself, and the others train on (`quorum`).

    A job that may be restarted, or has parameter servers, has one DTRAIN_JOB for all attempts and a
    DTRAIN_ATTEMPT, from 0, for each. After a failure, the last lines of the failed task are shown again. When
    this function returns, no process of the job is left, nor any process that one of them started.

    Args:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        stdout, stderr: where the prefixed lines go; by default this process's own streams.
        states: where to note what each task does, for another thread that shows it.
        options: the other attributes of `JobSpec`; `workers` is required.

    Returns:
        0 if the job succeeded. If a task failed, the exit status of the first one that did, or 128 + the
        signal that killed it. If this process received a signal, 128 + that signal (130 for Ctrl-C), or 75
        if every task answered the signal by saving a checkpoint, so that the job can be run again and resume.

    Raises:
        ConfigurationError: an option is invalid (see `JobSpec`), or the system refuses ports, processes or
            files.
        MPIError: mpi4py or the starter is missing, or the starter failed.
        PeerMissingError: too few of the machines have joined the job, or too few are left.
        PeerMismatchError: a machine of the job has another version of dtrain or Python.
        PortInUseError: another process uses the port at which the other machines join.
        RayError: Ray cannot be used, or has ended.
        UnsupportedVersionError: the launcher is "ray", and Ray is missing or too old.
    """
    spec = JobSpec(command=command, **options)
    session = Session(stdout=stdout, stderr=stderr, takes_reports=True, notices=(signal.SIGUSR1,))
    launcher = make_launcher(spec, session)
    if launcher.restarts_job:
        spec = dataclasses.replace(spec, max_restarts=0, min_workers=None)
    job = _job(spec, launcher)
    if states is not None:
        job.record.states = states
    logs = kept_logs(spec.log_dir, session.console, session.say)
    with session.opened(), logs, launcher.opened(), job.opened():
        outcome = job.run()
        launcher.job_ended(exit_status(outcome))
    job.finish(outcome)
    return exit_status(outcome)


def _job(spec: JobSpec, launcher: Launcher) -> RestartedJob:
    if spec.quorum is not None:
        from dtrain.launch.supervision.quorum import QuorumJob  # late: other jobs need no NumPy

        return QuorumJob(spec, launcher)
    return ParameterServerJob(spec, launcher) if spec.ps else SynchronousJob(spec, launcher)
