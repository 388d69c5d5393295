"""Where am I running? The answer to that question, read from the environment and from nowhere else.

One file an environment: `tf_config`, `mpi`, and `settings` for dtrain's own variables. It starts no process
and chooses no strategy.
"""

from __future__ import annotations

from dtrain.cluster import mpi, settings, tf_config
from dtrain.cluster.rendezvous import check_peers
from dtrain.topology import Topology

__all__ = ["check_peers", "current", "mpi", "settings"]


# The job that a strategy joined by a resolver of the program's own, where the environment names none.
_joined: Topology | None = None


def join(topology: Topology) -> None:
    """Notes that this process is part of a job, for those who ask `current`."""
    global _joined
    _joined = topology


def current() -> Topology | None:
    """The topology of the job that this process is part of, or None where it is alone.

    TF_CONFIG comes first; then what was given to `join`; then the MPI start, for which the first call of
    every rank waits for the others'.

    Raises:
        ClusterConfigError: the environment describes a cluster, but wrongly.
        MPIError: there is an MPI start, but the ranks cannot talk.
    """
    return tf_config.topology() or _joined or mpi.topology()


def by_mpi_alone() -> bool:
    """Whether it is an MPI start that makes this process part of a job, and TF_CONFIG says nothing of it."""
    return mpi.size() > 1 and tf_config.topology() is None


def origin(topology: Topology) -> str:
    """What says how many processes this job has, in words: "TF_CONFIG has 2" or "an MPI start of 2"."""
    count = topology.world_size
    if mpi.started_by_mpi() and mpi.size() == count and not topology.jobs.get("ps"):
        return f"an MPI start of {count}"
    return f"TF_CONFIG has {count}"
