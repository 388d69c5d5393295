"""Builds the environment variables of a task: its role in the job, and the variables that all tasks share.

It starts no process; `dtrain.environments` reads these variables in the task.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dtrain.base.tcp import loopback_host
from dtrain.environments import without_task
from dtrain.environments.topology import Task, Topology
from dtrain.launch.job.spec import check_integer
from dtrain.upstream import noise


def worker_tasks(workers: int) -> list[Task]:
    """The tasks of a job that consists only of workers, in index order."""
    return [Task("worker", index) for index in range(workers)]


def local_topologies(tasks: Sequence[Task], ports: Sequence[int]) -> list[Topology]:
    """The topology as each task of a job on this machine sees it.

    Args:
        tasks: the tasks; those of one name (worker, ps) in index order.
        ports: the port of each task.
    """
    host = loopback_host()
    jobs: dict[str, tuple[str, ...]] = {}
    for task, port in zip(tasks, ports, strict=True):
        jobs[task.job] = (*jobs.get(task.job, ()), f"{host}:{port}")
    return [Topology(jobs, task.job, task.index) for task in tasks]


def task_environment(
    topology: Topology | None, devices_per_worker: int | None, extra: Mapping[str, str] | None
) -> dict[str, str]:
    """The complete environment of one task.

    It is this process's environment, overridden by `extra`, and then by the variables that identify the task.

    Args:
        topology: the task's view of the job; None gives the environment that all tasks share.
        devices_per_worker: the number of logical devices in the task; None sets no variable.
        extra: variables to add or replace.

    Raises:
        ConfigurationError: `devices_per_worker` is below 1.
    """
    # If this launcher is itself a task of a job, its tasks must not take themselves for that task.
    env = without_task({**os.environ, **(extra or {})})
    if topology is not None:
        env["TF_CONFIG"] = topology.to_tf_config()
    env["DTRAIN_LAUNCHED"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code prints the Python stack of each thread
    env.setdefault(noise.LEVEL, "1")  # hides TensorFlow's info messages, keeps its warnings and errors
    check_integer("devices_per_worker", devices_per_worker, least=1)
    if devices_per_worker is not None:
        env["DTRAIN_DEVICES_PER_WORKER"] = str(devices_per_worker)
    return env


def measured_environment(topology: Topology | None, extra: Mapping[str, str]) -> dict[str, str]:
    """As `task_environment`, for a program that is measured: no launcher is known, and no CPU is divided."""
    env = task_environment(topology, None, extra)
    return {name: env[name] for name in env if name not in ("DTRAIN_DEVICES_PER_WORKER", "DTRAIN_LAUNCHED")}
