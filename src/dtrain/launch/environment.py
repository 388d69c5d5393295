"""The environment of a task: which task it is of which job, and what all tasks have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dtrain.cluster import mpi
from dtrain.cluster.sockets import loopback_host
from dtrain.launch.spec import check_integer
from dtrain.topology import Task, Topology
from dtrain.upstream import noise

# Variables that say to a task which it is; they may be there of a job around this one.
_OF_A_TASK = ("TF_CONFIG", "DTRAIN_JOB", "DTRAIN_ATTEMPT", "DTRAIN_PLACE", "DTRAIN_WORKERS_MAX")


def worker_tasks(workers: int) -> list[Task]:
    """The tasks of a job that has only workers."""
    return [Task("worker", index) for index in range(workers)]


def local_topologies(tasks: Sequence[Task], ports: Sequence[int]) -> list[Topology]:
    """The view that each task has of a job on this machine, given the tasks of every job in index order."""
    host = loopback_host()
    jobs: dict[str, tuple[str, ...]] = {}
    for task, port in zip(tasks, ports, strict=True):
        jobs[task.job] = (*jobs.get(task.job, ()), f"{host}:{port}")
    return [Topology(jobs, task.job, task.index) for task in tasks]


def task_environment(
    topology: Topology | None, devices_per_worker: int | None, extra: Mapping[str, str] | None
) -> dict[str, str]:
    """The whole environment of one task: this process's, then `extra`, then what says which task it is.

    Without a topology, what all tasks have in common.

    Raises:
        ConfigurationError: `devices_per_worker` is below 1.
    """
    # A rank of an MPI start may launch a job; its tasks are not that rank.
    env = {**mpi.without_start(os.environ), **(extra or {})}
    for variable in _OF_A_TASK:
        env.pop(variable, None)
    if topology is not None:
        env["TF_CONFIG"] = topology.to_tf_config()
    env["DTRAIN_LAUNCHED"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault(noise.LEVEL, "1")  # TensorFlow's warnings and errors stay
    check_integer("devices_per_worker", devices_per_worker, least=1)
    if devices_per_worker is not None:
        env["DTRAIN_DEVICES_PER_WORKER"] = str(devices_per_worker)
    return env
