"""The registry of environments, and what this process learns from them: its job, and where that was found.

If several environments are found, the first in the order of `ENVIRONMENTS` counts. Each is read in its file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dtrain.environments import mpi_start, settings, shown_variables
from dtrain.environments.environment import Environment, not_detected
from dtrain.environments.jobset import JobSet
from dtrain.environments.kubeflow import KubeflowTrainJob
from dtrain.environments.mpi_start import MPIStart
from dtrain.environments.ray_workers import RAY
from dtrain.environments.slurm_step import SlurmStep
from dtrain.environments.tf_config import TFConfig
from dtrain.environments.topology import Topology
from dtrain.environments.torchrun import TorchRun
from dtrain.environments.tpu_vm import TPUHosts
from dtrain.errors import ConfigurationError


class _Joined(Environment):
    """The job that a strategy of this process has joined, which its program may have described itself."""

    name = "joined"
    label = "the strategy's cluster resolver"
    job: Topology | None = None

    def detected(self) -> bool:
        return self.job is not None

    def topology(self) -> Topology:
        if self.job is None:
            raise not_detected("No strategy has joined a job.")
        return self.job


_JOINED = _Joined()

ENVIRONMENTS: dict[str, Environment] = {
    environment.name: environment
    for environment in (
        TFConfig(),
        _JOINED,
        RAY,
        MPIStart(),
        SlurmStep(),
        JobSet(),
        KubeflowTrainJob(),
        TorchRun(),
        TPUHosts(),
    )
}
"""The environments by name, in the order of precedence: explicit descriptions of the job come first."""


def register(environment: Environment, *, before: str = MPIStart.name) -> None:
    """Add an environment, before any strategy is made.

    Args:
        environment: an instance of a subclass of `Environment`.
        before: the name of the environment over which it takes precedence.

    Raises:
        ConfigurationError: an environment of this name is registered, or there is none called `before`.
    """
    if environment.name in ENVIRONMENTS or before not in ENVIRONMENTS:
        raise ConfigurationError(
            f"The environment {environment.name!r} cannot be registered before {before!r}.",
            hint=f"Registered are {', '.join(ENVIRONMENTS)}.",
        )
    names = [*ENVIRONMENTS]
    moved = [ENVIRONMENTS.pop(name) for name in names[names.index(before) :]]
    ENVIRONMENTS.update({entry.name: entry for entry in (environment, *moved)})


def found() -> list[Environment]:
    """The environments that this process is in, in the order of precedence; the first one names the job."""
    return [environment for environment in ENVIRONMENTS.values() if environment.detected()]


def current() -> Topology | None:
    """The topology of the job that this process is part of, or None if it is a job of its own.

    TF_CONFIG has precedence, then the topology given to `join`, then the other environments. With an MPI
    start, the first call is collective: it returns when all ranks have called.

    Raises:
        ClusterConfigError: TF_CONFIG, or another description of the job, is invalid.
        MPIError: an MPI starter started this process, but the ranks cannot communicate.
    """
    first = next(iter(found()), None)
    return None if first is None else first.topology()


def local_rank() -> int:
    """The number of this process among the workers of its host; 0 without a job.

    It comes from DTRAIN_LOCAL_RANK or the environment, such as an MPI start; else from the job's addresses.

    Raises:
        ClusterConfigError, MPIError: as `current`, if the addresses are needed.
    """
    given = settings.local_rank()
    for environment in found():
        given = environment.local_rank() if given is None else given
    if given is not None:
        return given
    topology = current()
    return 0 if topology is None else topology.local_rank


def join(topology: Topology, *, by_program: bool) -> None:
    """Record the job that a strategy of this process is part of; it stays known if the environment changes.

    Args:
        topology: the job.
        by_program: whether the program described it by a cluster resolver; otherwise `current` returned it.
    """
    named = _Joined.label if by_program else found()[0].label
    _JOINED.job, _JOINED.label = topology, named


def origin() -> str:
    """Where the job was found, as the subject of a sentence, such as "TF_CONFIG"; "" without a job.

    If several environments were found, it names the rule: "TF_CONFIG, which precedes an MPI start,".
    """
    labels = [*dict.fromkeys(environment.label for environment in found())]
    return f"{labels[0]}, which precedes {' and '.join(labels[1:])}," if labels[1:] else "".join(labels)


def how_to_disable() -> str:
    """What a user does so that this process is a job of its own, such as "unset TF_CONFIG"; "" if unknown."""
    return next((environment.leave for environment in found()), "")


def known_to_tensorflow() -> bool:
    """Whether TensorFlow's own resolver finds the job, or there is none."""
    return all(environment.known_to_tensorflow for environment in found()[:1])


def describe() -> dict[str, Any]:
    """What is known of this process's place, as values that JSON can hold. Collective where `current` is.

    Returns:
        `environment` and `also_found` (names in `ENVIRONMENTS`), `precedence` (all names in order),
        `schedulers` (such as "Slurm" or "Ray", which run this process whoever describes its job), and, with a
        job, `task` and `jobs` (addresses by job). In an MPI start also `mpi`: "Open MPI", "PMI" or "PMIx".
    """
    names, topology = [environment.name for environment in found()], current()
    about: dict[str, Any] = {
        "environment": next(iter(names), None),
        "also_found": names[1:],
        "precedence": [*ENVIRONMENTS],
        "schedulers": shown_variables.schedulers(),
    }
    if MPIStart.name in names:
        about["mpi"] = mpi_start.kind()
    if topology is None:
        return about
    return about | {
        "task": str(topology.task),
        "jobs": {job: [*addresses] for job, addresses in topology.jobs.items()},
    }


def without_task(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `env` without those that make a process a task of a job."""
    env = {name: value for name, value in env.items() if name not in settings.TASK_VARIABLES}
    for environment in ENVIRONMENTS.values():
        env = environment.without(env)
    return env


def plain_environment() -> dict[str, str]:
    """The environment for a helper process that is no task of the job and sees no GPU."""
    return without_task(os.environ) | {"CUDA_VISIBLE_DEVICES": "-1"}
