"""Finds the job that this process is part of, from its environment, and meets the other processes of the job.

Each kind of environment has a file: `tf_config`, `mpi`, `tpu`, `gpus`, and `settings` for dtrain's own
variables. This package starts no process and chooses no strategy.
"""

from __future__ import annotations

from dtrain.cluster import mpi, settings, tf_config
from dtrain.cluster.rendezvous import check_peers
from dtrain.topology import Topology

__all__ = ["check_peers", "current", "mpi", "settings"]


# The job that a strategy joined through the program's own cluster resolver, if the environment names none.
_joined: Topology | None = None


def join(topology: Topology) -> None:
    """Record the job that this process is part of, for `current`."""
    global _joined
    _joined = topology


def current() -> Topology | None:
    """The topology of the job that this process is part of, or None if it is a job of its own.

    TF_CONFIG has precedence, then the topology given to `join`, then an MPI start. With an MPI start, the
    first call is collective: it returns when all ranks have called.

    Raises:
        ClusterConfigError: TF_CONFIG is invalid.
        MPIError: an MPI starter started this process, but the ranks cannot communicate.
    """
    return tf_config.topology() or _joined or mpi.topology()


def by_mpi_alone() -> bool:
    """Whether this process is part of a job only through an MPI start, without TF_CONFIG."""
    return mpi.size() > 1 and tf_config.topology() is None


def origin(topology: Topology) -> str:
    """The source of a job's number of processes, in words: "TF_CONFIG has 2" or "an MPI start of 2"."""
    count = topology.world_size
    if mpi.started_by_mpi() and mpi.size() == count and not topology.jobs.get("ps"):
        return f"an MPI start of {count}"
    return f"TF_CONFIG has {count}"
