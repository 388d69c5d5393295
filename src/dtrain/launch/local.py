"""One command, once for each task of a job, on this machine.

It picks the ports and says to each process in TF_CONFIG which task it is; watching the processes is the
business of `processes`, what their deaths mean and how to report them that of `supervisor`.
"""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TextIO

from dtrain.errors import ConfigurationError
from dtrain.launch.ports import reserve_ports
from dtrain.launch.processes import Job, TaskCommand
from dtrain.launch.supervisor import MAX_RESTARTS, exit_status, report, supervise
from dtrain.topology import Task, Topology

GRACE = 5.0
"""Seconds between asking the tasks of a job to end and killing them."""


def launch_local(
    command: Sequence[str],
    *,
    workers: int,
    ps: int = 0,
    max_restarts: int | None = None,
    devices_per_worker: int | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run a command as every task of a job on this machine, until all have ended.

    Every line of output is marked with its task. Without parameter servers the tasks are workers, and the
    first that fails ends the others. With them, a chief is started too, and its end is the job's; what the
    failure of another means, and what is started again then, says `supervisor.ParameterServerPolicy`. The
    last lines of what failed are shown again. No process of the job, nor any that one started, is left when
    this returns.

    Args:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        workers: the number of workers, at least 1.
        ps: the number of parameter servers; with any, there is a chief beside them and the workers.
        max_restarts: with parameter servers, how many restarts any hour may see, of single workers and of the
            whole job together; None means 3.
        devices_per_worker: the number of logical devices in each, at least 1; None leaves it to the process.
            Not with parameter servers, whose workers have one.
        env: what to add to this process's environment, or to replace in it.
        grace: seconds between asking tasks to end (SIGTERM, or the signal that this process got) and SIGKILL.
        stdout, stderr: where the marked lines go; by default this process's own streams.

    Returns:
        0 if the job ended well; the exit status of the first task that failed, 128 + the signal if one killed
        it; or 128 + the signal that this process was sent (130 for Ctrl-C).

    Raises:
        ConfigurationError: a number is out of range, the command is empty, two arguments exclude each other,
            or there are no free ports.
    """
    if not command:
        raise ConfigurationError("No command was given to launch.", hint="Pass a script, or -m and a module.")
    tasks = worker_tasks(workers)
    _check_servers(ps, max_restarts, devices_per_worker)
    if ps:
        tasks = [Task("chief", 0), *tasks, *(Task("ps", index) for index in range(ps))]
    with reserve_ports(len(tasks)) as ports:
        topologies = local_topologies(tasks, ports)

        def commands(extra: Mapping[str, str]) -> list[TaskCommand]:
            return [
                TaskCommand(t.task, command, {**task_environment(t, devices_per_worker, env), **extra})
                for t in topologies
            ]

        if ps:
            name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
            outcome = supervise(
                lambda attempt: commands({"DTRAIN_JOB": name, "DTRAIN_ATTEMPT": str(attempt)}),
                addresses={t.task: t.address for t in topologies},
                max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts,
                grace=grace,
                stdout=stdout,
                stderr=stderr,
            )
        else:
            job = Job(commands({}), grace=grace, stdout=stdout, stderr=stderr)
            outcome = job.run()
            for line in report(outcome):
                job.console.write_line(line, to="stderr")
    return exit_status(outcome)


def _check_servers(ps: int, max_restarts: int | None, devices_per_worker: int | None) -> None:
    for name, value in (("ps", ps), ("max_restarts", max_restarts)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigurationError(f"{name} is {value!r}, not an integer of at least 0.")
    if not ps and max_restarts is not None:
        raise ConfigurationError(
            f"max_restarts is {max_restarts}, but the job has no parameter servers: without them the first "
            "failure ends it.",
            hint="Leave it out, or start parameter servers (--ps).",
        )
    if ps and devices_per_worker is not None:
        raise ConfigurationError(
            f"devices_per_worker is {devices_per_worker}, but a worker of parameter servers has one device.",
            hint="Start more workers instead.",
        )


def worker_tasks(workers: int) -> list[Task]:
    """The tasks of a job that has only workers; ConfigurationError if there are none."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigurationError(f"workers is {workers!r}, not an integer of at least 1.")
    return [Task("worker", index) for index in range(workers)]


def local_topologies(tasks: Sequence[Task], ports: Sequence[int]) -> list[Topology]:
    """The view that each task has of a job on this machine, given the tasks of every job in index order."""
    jobs: dict[str, tuple[str, ...]] = {}
    for task, port in zip(tasks, ports, strict=True):
        jobs[task.job] = (*jobs.get(task.job, ()), f"127.0.0.1:{port}")
    return [Topology(jobs, task.job, task.index) for task in tasks]


def task_environment(
    topology: Topology, devices_per_worker: int | None, extra: Mapping[str, str] | None
) -> dict[str, str]:
    """The whole environment of one task: this process's, then `extra`, then what says which task it is.

    Raises:
        ConfigurationError: `devices_per_worker` is below 1.
    """
    env = {**os.environ, **(extra or {})}
    for variable in ("DTRAIN_JOB", "DTRAIN_ATTEMPT"):  # of a job around this one
        env.pop(variable, None)
    env["TF_CONFIG"] = topology.to_tf_config()
    env["DTRAIN_LAUNCHED"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    if devices_per_worker is not None:
        if isinstance(devices_per_worker, bool) or devices_per_worker < 1:
            raise ConfigurationError(
                f"devices_per_worker is {devices_per_worker!r}, not an integer of at least 1."
            )
        env["DTRAIN_DEVICES_PER_WORKER"] = str(devices_per_worker)
    return env
