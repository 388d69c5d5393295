"""Where am I running? The answer to that question, read from the environment and from nowhere else.

One file an environment: `tf_config`, and `settings` for dtrain's own variables. It starts no process and
chooses no strategy.
"""

from __future__ import annotations

from dtrain.cluster import settings, tf_config
from dtrain.cluster.rendezvous import check_peers
from dtrain.topology import Topology

__all__ = ["check_peers", "current", "settings"]


# The job that a strategy joined by a resolver of the program's own, where the environment names none.
_joined: Topology | None = None


def join(topology: Topology) -> None:
    """Notes that this process is part of a job, for those who ask `current`."""
    global _joined
    _joined = topology


def current() -> Topology | None:
    """The topology of the job that this process is part of, or None where it is alone.

    What the environment describes comes first; then what was given to `join`.

    Raises:
        ClusterConfigError: the environment describes a cluster, but wrongly.
    """
    return tf_config.topology() or _joined
