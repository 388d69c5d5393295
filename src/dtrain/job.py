"""Who this process is in its job, and the two ways for processes to meet outside of training.

Alone, a process is the chief of a job of one. So is the chief of a job with parameter servers: its workers
and servers never come past the making of the strategy. Values in a training step go through the strategy.
"""

from __future__ import annotations

from typing import Any

from dtrain.cluster import current, settings
from dtrain.errors import ClusterConfigError, ConfigurationError
from dtrain.topology import Topology


def rank() -> int:
    """This process' number among those that run the program; 0 when alone.

    Raises:
        ClusterConfigError: this process does not run it (a parameter server, its worker, an evaluator).
    """
    topology = current()
    if topology is None:
        return 0
    return 0 if _runs_alone(topology) else topology.rank


def world_size() -> int:
    """How many processes run the program; 1 when alone, and with parameter servers, where it is the chief.

    Raises:
        ClusterConfigError: this process serves the chief of a job with parameter servers.
    """
    topology = current()
    if topology is None:
        return 1
    return 1 if _runs_alone(topology) else topology.world_size


def is_chief() -> bool:
    """Whether this is the process that writes what is to be written once."""
    topology = current()
    return topology is None or topology.is_chief


def barrier(*, timeout: float | None = None) -> None:
    """Returns when every training process has called it.

    Args:
        timeout: seconds to wait for the others; None waits as long as they are alive.

    Raises:
        PeerMissingError: a process did not call it in time.
        ConfigurationError: the job has several processes, but no strategy connects them yet, or this one
            serves the chief of a job with parameter servers.
    """
    _exchange(None, timeout)


def broadcast(value: Any, *, timeout: float | None = None) -> Any:
    """The chief's value, in every training process; each must call it.

    Args:
        value: anything that can be pickled; only the chief's matters. Where the processes share no secret
            (docs/security.md), numbers, text, bytes, NumPy arrays, and containers of them.
        timeout: as for `barrier`.

    Raises:
        PeerMissingError: the chief did not call it in time.
        AuthenticationError: what is there in the chief's name was not signed by it.
        ConfigurationError: the value cannot be sent; or the job has several processes, but no strategy
            connects them yet, or this one serves the chief of a job with parameter servers.
    """
    return _exchange(value if is_chief() else None, timeout)[0]


def full_size(replicas: int) -> int:
    """How many replicas there are when no worker of an elastic job is absent (`--workers MIN:MAX`).

    Args:
        replicas: how many there are now.
    """
    full, now = settings.full_workers(), world_size()
    return replicas if full is None else replicas * full // now


def _runs_alone(topology: Topology) -> bool:
    """Whether this is the chief of a job with parameter servers; an error on its workers and servers."""
    if not topology.is_coordinated:
        return False
    if not topology.is_chief and topology.task_type != "evaluator":
        raise ClusterConfigError(
            f"{topology.task} serves the chief, which alone runs the program, so it does not train by itself "
            "and has no rank.",
            hint="Make the strategy first: a worker or parameter server does not go on from there.",
        )
    return topology.is_chief


def _exchange(value: Any, timeout: float | None) -> list[Any]:
    size = world_size()
    if size == 1:
        return [value]
    from dtrain.keras_engine.protocol import ReplicaLayout
    from dtrain.keras_engine.talk import exchange
    from dtrain.upstream.tensorflow import connected

    if not connected():
        raise ConfigurationError(
            f"The {size} processes of this job are not connected yet.",
            hint="make the strategy first: dtrain.MultiWorkerMirroredStrategy() or dtrain.strategy('auto')",
        )
    return exchange(ReplicaLayout(workers=size, worker=rank()), value, timeout=timeout, objects=True)
