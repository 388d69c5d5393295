"""The registry of launchers, by name.

A launcher that is added here can be chosen in every job (`JobSpec.launcher`).
"""

from __future__ import annotations

from collections.abc import Callable

from dtrain.base.words import known_word
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Launcher
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.mpi.mpi_launcher import MPILauncher


def _on_nodes(session: Session, spec: JobSpec | None = None) -> Launcher:
    from dtrain.launch.hosts.nodes_launcher import NodesLauncher  # late: most jobs need no ZeroMQ

    return NodesLauncher(session, spec)


def _by_ssh(session: Session, spec: JobSpec | None = None) -> Launcher:
    from dtrain.launch.hosts.ssh_launcher import SSHLauncher

    return SSHLauncher(session, spec)


def _on_ray(session: Session, spec: JobSpec | None = None) -> Launcher:
    from dtrain.launch.hosts.ray_launcher import RayLauncher

    return RayLauncher(session, spec)


def _by_mpi(session: Session, spec: JobSpec | None = None) -> Launcher:
    if spec is None or spec.hosts is None:
        return MPILauncher(session, spec)
    from dtrain.launch.mpi.mpi_hosts import MPIHostsLauncher

    return MPIHostsLauncher(session, spec)


LAUNCHERS: dict[str, Callable[[Session, JobSpec], Launcher]] = {
    "local": LocalLauncher,
    "mpi": _by_mpi,
    "nodes": _on_nodes,
    "ray": _on_ray,
    "ssh": _by_ssh,
}


def make_launcher(spec: JobSpec, session: Session) -> Launcher:
    """The launcher that a job names.

    Raises:
        ConfigurationError: there is no launcher of this name.
        MPIError: the job is to be started by MPI, and mpi4py or the starter is missing.
    """
    return LAUNCHERS[known_word("launcher", spec.launcher, LAUNCHERS)](session, spec)
