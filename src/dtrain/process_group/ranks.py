"""This process's rank in its job, and two collective calls outside of training: `barrier` and `broadcast`.

A process without a job has rank 0 of 1. So has the chief of a job with parameter servers, because its workers
and servers do not run the program past the creation of the strategy. Values inside a training step are the
strategy's task, not this module's.
"""

from __future__ import annotations

from typing import Any

from dtrain import environments
from dtrain.environments import current, settings
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, ConfigurationError


def rank() -> int:
    """The rank of this process among those that run the program; 0 without a job.

    Raises:
        ClusterConfigError: this process does not run the program, because it is a parameter server, a worker
            of a job with parameter servers, or an evaluator.

    Example:
        ```python
        print(f"process {dtrain.rank()} of {dtrain.world_size()}")  # process 0 of 1, without a job
        ```
    """
    topology = current()
    if topology is None:
        return 0
    return 0 if _runs_alone(topology) else topology.rank


def local_rank() -> int:
    """The number of this process among the workers of its machine, from 0; 0 without a job.

    A program that chooses a GPU or a folder by itself can use it. Under `dtrain launch` each worker sees its
    own GPU already.

    Raises:
        ClusterConfigError: the description of the job is invalid.
        MPIError: the ranks of an MPI start cannot be counted.

    Example:
        ```python
        cache = f"cache-{dtrain.local_rank()}"  # a folder for each worker of the machine
        ```
    """
    return environments.local_rank()


def world_size() -> int:
    """The number of processes that run the program; 1 without a job, and on the chief of parameter servers.

    Raises:
        ClusterConfigError: this process serves the chief of a job with parameter servers.

    Example:
        ```python
        rows = np.arange(100)[dtrain.rank() :: dtrain.world_size()]  # this process's part
        ```
    """
    topology = current()
    if topology is None:
        return 1
    return 1 if _runs_alone(topology) else topology.world_size


def is_chief() -> bool:
    """Whether this process is the chief, which writes files and logs that are written once per job.

    Example:
        ```python
        if dtrain.is_chief():
            print("printed once per job")
        ```
    """
    topology = current()
    return topology is None or topology.is_chief


def barrier(*, timeout: float | None = None) -> None:
    """Wait until every training process has called this function.

    Args:
        timeout: seconds to wait for the other processes; None waits as long as they are alive.

    Raises:
        PeerMissingError: a process did not call it in time.
        OperationMismatchError: another process does something else.
        ConfigurationError: the job has several processes, but no strategy of dtrain's connects them yet; or
            this process serves the chief of a job with parameter servers.

    Example:
        ```python
        from pathlib import Path

        if dtrain.is_chief():
            Path("prepared").mkdir()
        dtrain.barrier(timeout=60)
        assert Path("prepared").is_dir()  # in every process that sees the chief's disk
        ```
    """
    _exchange(None, timeout, "barrier")


def broadcast(value: Any, *, timeout: float | None = None) -> Any:
    """Return the chief's value in every training process; each process must call this function.

    Args:
        value: any object that can be pickled; only the chief's value is used. If the processes share no
            secret (docs/security.md), only numbers, text, bytes, NumPy arrays, and containers of them.
        timeout: as for `barrier`.

    Returns:
        The chief's value.

    Raises:
        PeerMissingError: the chief did not call it in time.
        OperationMismatchError: another process does something else.
        AuthenticationError: the received value was not signed with the job's secret.
        ConfigurationError: the value cannot be sent; or the job has several processes, but no strategy of
            dtrain's connects them yet; or this process serves the chief of a job with parameter servers.

    Example:
        ```python
        seed = dtrain.broadcast(np.random.randint(1000))  # the chief's number, in every process
        keras.utils.set_random_seed(seed)
        ```
    """
    return _exchange(value if is_chief() else None, timeout, "broadcast")[0]


def full_size(replicas: int) -> int:
    """The number of replicas when no worker of an elastic job (`--workers MIN:MAX`) is absent.

    Args:
        replicas: the present number of replicas.
    """
    full, now = settings.full_workers(), world_size()
    return replicas if full is None else replicas * full // now


def _runs_alone(topology: Topology) -> bool:
    """Whether this process is the chief of a job with parameter servers.

    Raises:
        ClusterConfigError: this process is a worker or parameter server of such a job.
    """
    if not topology.is_coordinated:
        return False
    if not topology.is_chief and topology.task_type != "evaluator":
        raise ClusterConfigError(
            f"{topology.task} serves the chief, which alone runs the program, so it does not train by itself "
            "and has no rank.",
            hint="Make the strategy first: a worker or parameter server does not continue after it.",
        )
    return topology.is_chief


def _exchange(value: Any, timeout: float | None, call: str) -> list[Any]:
    size = world_size()
    if size == 1:
        return [value]
    if settings.quorum() is not None:
        from dtrain.process_group import quorum_client

        client = quorum_client.connected()
        if client is None:
            raise ConfigurationError(
                f"{call} was called before a strategy of dtrain's connects the workers of this job.",
                hint="make dtrain.MultiWorkerMirroredStrategy(gradient_hook=...) before this call",
            )
        return [client.meet(value, call)]
    from dtrain.interfaces.replica_layout import ReplicaLayout
    from dtrain.process_group.value_exchange import exchange

    return exchange(
        ReplicaLayout(workers=size, worker=rank()), value, timeout=timeout, objects=True, call=call
    )
