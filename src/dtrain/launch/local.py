"""One command, once for each task of a job, on this machine.

It picks the ports, says to each process in TF_CONFIG which task it is, and reports how the job ended;
watching the processes is the business of `processes`, restarting them is nobody's here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import TextIO

from dtrain.errors import ConfigurationError
from dtrain.launch.ports import reserve_ports
from dtrain.launch.processes import Job, Outcome, TaskCommand
from dtrain.topology import Task, Topology

GRACE = 5.0
"""Seconds between asking the tasks of a job to end and killing them."""


def launch_local(
    command: Sequence[str],
    *,
    workers: int,
    devices_per_worker: int | None = None,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run a command as every worker of a job on this machine, until all have ended.

    Every line of output is marked with its task. The first task that fails ends the others, and its last
    lines are shown again. No process of the job, nor any that one started, is left when this returns.

    Args:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        workers: the number of processes, at least 1.
        devices_per_worker: the number of logical devices in each, at least 1; None leaves it to the process.
        env: what to add to this process's environment, or to replace in it.
        grace: seconds between asking tasks to end (SIGTERM, or the signal that this process got) and SIGKILL.
        stdout, stderr: where the marked lines go; by default this process's own streams.

    Returns:
        0 if every task ended well; the exit status of the first that failed, 128 + the signal if one killed
        it; or 128 + the signal that this process was sent (130 for Ctrl-C).

    Raises:
        ConfigurationError: a number is below 1, the command is empty, or there are no free ports.
    """
    if not command:
        raise ConfigurationError("No command was given to launch.", hint="Pass a script, or -m and a module.")
    tasks = worker_tasks(workers)
    with reserve_ports(len(tasks)) as ports:
        commands = [
            TaskCommand(topology.task, command, task_environment(topology, devices_per_worker, env))
            for topology in local_topologies(tasks, ports)
        ]
        job = Job(commands, grace=grace, stdout=stdout, stderr=stderr)
        outcome = job.run()
    for line in _report(outcome):
        job.console.write_line(line, to="stderr")
    return _exit_status(outcome)


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


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def _report(outcome: Outcome) -> list[str]:
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


def _exit_status(outcome: Outcome) -> int:
    if outcome.first_failure is not None:
        code = outcome.exit_codes[outcome.first_failure]
        return code if code >= 0 else 128 - code
    if outcome.signal is not None:
        return 128 + outcome.signal
    return 0
