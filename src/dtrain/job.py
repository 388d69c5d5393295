"""Who this process is in its job, and the two ways for processes to meet outside of training.

Alone, a process is the chief of a job of one. Values in a training step go through the strategy instead.
"""

from __future__ import annotations

from typing import Any

from dtrain.cluster import current
from dtrain.errors import ConfigurationError


def rank() -> int:
    """This process' number among the training processes; 0 when alone.

    Raises:
        ClusterConfigError: this process does not train (a parameter server, an evaluator).
    """
    topology = current()
    return 0 if topology is None else topology.rank


def world_size() -> int:
    """How many training processes the job has; 1 when alone."""
    topology = current()
    return 1 if topology is None else topology.world_size


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
        ConfigurationError: the job has several processes, but no strategy connects them yet.
    """
    _exchange(None, timeout)


def broadcast(value: Any, *, timeout: float | None = None) -> Any:
    """The chief's value, in every training process; each must call it.

    Args:
        value: anything that can be pickled; only the chief's matters.
        timeout: as for `barrier`.

    Raises:
        PeerMissingError: the chief did not call it in time.
        ConfigurationError: the job has several processes, but no strategy connects them yet.
    """
    return _exchange(value if is_chief() else None, timeout)[0]


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
    return exchange(ReplicaLayout(workers=size, worker=rank()), value, timeout=timeout)
