"""`FullyShardedStrategy`: weights, gradients and optimizer state divided over the replicas.

A weight is divided along one dimension from the moment it is made. A step is traced as one device's, on
variables that have the whole shape and no memory; the partitioner replaces them by what the replicas hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from dtrain.engine.fit.memory_advice import memory_explained
from dtrain.errors import ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.partition.shard_groups import ShardGroups
from dtrain.strategies.divided_variable import SMALLEST, DividedVariable, dim_to_divide
from dtrain.strategies.multi_worker import (
    MultiWorkerMirroredExtended,
    MultiWorkerMirroredStrategy,
    ServerlessExtended,
)
from dtrain.upstream import keras_variables, tf_variables


class _Divides(MultiWorkerMirroredExtended):
    """Mixin: divides variables that are large enough."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        parts = 1 if self._layout.shard_groups is None else self._layout.shard_groups.parts
        value = kwargs.get("initial_value")
        # A variable of a SavedModel gets its value later; the functions of a SavedModel read it whole.
        if parts == 1 or on_read or value is None or tf.is_symbolic_tensor(value):
            return super()._create_variable(next_creator, **kwargs)
        with memory_explained(self._container_strategy()):
            return self._made(next_creator, parts, kwargs)

    def _made(self, next_creator: Any, parts: int, kwargs: dict[str, Any]) -> Any:
        strategy = self._container_strategy()
        calls = strategy.dtrain_managed.calls
        # The first worker's value counts. Others draw it only if that may change a state, such as that of a
        # generator, which must stay the same on all workers.
        receives = calls is not None and self._layout.worker > 0
        value = keras_variables.shape_of_pure_initializer(kwargs) if receives else None
        if value is None:
            value = kwargs["initial_value"] = tf_variables.initial_value(kwargs)
        dim = dim_to_divide(value.shape, parts, strategy.smallest)
        if dim is None or not value.dtype.is_floating:
            return super()._create_variable(next_creator, **kwargs)
        if calls is None:
            value = self._get_variable_creator_initial_value(
                replica_id=0, device=self.worker_devices[0], primary_var=None, **kwargs
            )()
        made = DividedVariable(strategy, value, dim, kwargs)
        self.dtrain_variables[next(self._numbers)] = made
        return made

    def update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True) -> Any:
        """As in TensorFlow; a divided variable is written as a whole."""
        if isinstance(var, DividedVariable):
            return fn(var, *args, **(kwargs or {}))
        return super().update(var, fn, args, kwargs, group)


class _ServerlessDivides(_Divides, ServerlessExtended):
    pass


class FullyShardedStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training of models that are larger than a device.

    Each replica holds a part of each large weight and of its optimizer state. A layer's weights are gathered
    just before it computes, in the forward and in the backward pass, and dropped afterwards; a gradient is
    summed into the parts that the replicas hold. The numbers are one device's.

    With one process, its devices are the replicas.

    Args:
        cluster_resolver: as that of `MultiWorkerMirroredStrategy`, and so are the next four.
        communication_options: as there.
        communication: as there.
        memory_growth: as there.
        peer_timeout: as there, in seconds.
        smallest: weights of fewer numbers stay whole on each replica, and so do vectors, such as biases.
        within: over which replicas a weight is divided. "job" divides it over all replicas. "host" divides
            it over the replicas of each host, so that each host holds the whole model, and weights are
            gathered within a host. A host is what stands before the port in the workers' addresses.

    Raises:
        DtrainError: as `MultiWorkerMirroredStrategy`.
        ConfigurationError: `within` is not known; or it is "host", and hosts have different numbers of
            workers, or one replica each, or several workers that TensorFlow's collectives connect.

    Example:
        ```python
        # train.py, to be run by: dtrain launch --workers 2 train.py
        import keras
        import numpy as np

        import dtrain

        strategy = dtrain.FullyShardedStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(np.ones((64, 64)), np.ones((64, 1)), verbose=0)
        ```

    Source: ZeRO-3 (arXiv 1910.02054), SimpleFSDP (arXiv 2411.00284).
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        communication: Any = None,
        memory_growth: bool = True,
        peer_timeout: float | None = None,
        smallest: int = SMALLEST,
        within: Literal["job", "host"] = "job",
    ) -> None:
        if within not in ("job", "host"):
            raise ConfigurationError(f"There is no within={within!r}.", hint='give "job" or "host"')
        self.smallest = smallest
        self._within = within
        super().__init__(
            cluster_resolver,
            communication_options,
            communication=communication,
            memory_growth=memory_growth,
            peer_timeout=peer_timeout,
        )

    def _shard_groups(self, layout: ReplicaLayout, hosts: Sequence[str]) -> ShardGroups:
        every = tuple(range(layout.workers))
        groups = groups_of_hosts(hosts, layout.local_replicas) if self._within == "host" else (every,)
        return ShardGroups(groups, layout.worker, layout.local_replicas)

    def _given(self) -> dict[str, Any]:
        return super()._given() | {"smallest": self.smallest, "within": self._within}

    def _extended_class(self, *, serverless: bool) -> Any:
        return _ServerlessDivides if serverless else _Divides


def groups_of_hosts(hosts: Sequence[str], replicas: int) -> tuple[tuple[int, ...], ...]:
    """The workers of each host.

    Args:
        hosts: the host of each worker.
        replicas: the number of replicas of each worker.

    Raises:
        ConfigurationError: several hosts have different numbers of workers, or one replica each.
    """
    groups = {
        host: tuple(worker for worker, other in enumerate(hosts) if other == host)
        for host in dict.fromkeys(hosts)
    }
    sizes = {len(group) for group in groups.values()}
    if len(sizes) > 1:
        counts = ", ".join(f"{host} has {len(group)}" for host, group in groups.items())
        raise ConfigurationError(
            f'within="host" was set, but the hosts have different numbers of workers: {counts}.',
            hint="start equally many workers on each host, or leave within out",
        )
    if len(groups) > 1 and sizes == {1} and replicas == 1:
        raise ConfigurationError(
            f'within="host" was set, but each host ({", ".join(groups)}) has one replica, which would hold '
            "whole weights.",
            hint="start several workers on each host, or leave within out",
        )
    return tuple(groups.values())
