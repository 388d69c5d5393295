"""`ParameterServerStrategy`: asynchronous training with weights on servers, independent workers and a chief.

Every process runs the same program. On a worker or a server, the constructor serves until the chief is done,
and then ends the process; only the chief runs the rest of the program. Steps are scheduled in
`engine/parameter_server`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.block_program import CHIEF
from dtrain.engine.parameter_server.exchange import Servers
from dtrain.engine.parameter_server.server_engine import ServerEngine
from dtrain.engine.parameter_server.server_updates import update
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables.split_variables import is_split
from dtrain.environments import current, join, known_to_tensorflow
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, ConfigurationError
from dtrain.gradient_hooks.hooks import server_hook_of
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.interfaces.managed_strategy import ManagedStrategy
from dtrain.interfaces.replica_layout import ServerLayout
from dtrain.interfaces.scope_checks import strategy_made
from dtrain.process_group import control, serving
from dtrain.strategies import common
from dtrain.strategies.partitioned import PartitionedVariable, made_partitioned, partition_like
from dtrain.task import channel
from dtrain.upstream import tensorflow_names

_HOME = "/job:ps/replica:0/task:0/device:CPU:0"

_Extended: Any = tensorflow_names.PS_EXTENDED.resolve()


class ParameterServerExtended(_Extended):  # type: ignore[misc]
    """The strategy's `extended`: creates variables on servers or the chief, and updates split variables."""

    _variable_partitioner: Any

    def _use_merge_call(self) -> bool:
        # The servers apply one worker's update at a time: there are no replicas to merge.
        return False if thread_state.updating_locally else bool(super()._use_merge_call())

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # A metric's variable is on the chief: workers count locally, and the chief sums their counts.
            kwargs.pop("aggregation", None)
            kwargs.pop("colocate_with", None)
            with tf.device(CHIEF):
                return next_creator(**kwargs)
        reference = kwargs.get("colocate_with")
        if isinstance(reference, PartitionedVariable):
            return self._create_beside(reference, next_creator, kwargs)
        if self._variable_partitioner is None or reference is not None:
            return super()._create_variable(next_creator, **kwargs)
        return self._create_partitioned(next_creator, kwargs)

    def _create_partitioned(self, next_creator: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Creates a variable split by the partitioner; scalars and integers stay whole."""
        # Compute the initial value once: a random initializer would draw again for every part.
        value = _initial_value(kwargs)
        kwargs |= {"initial_value": value, "shape": value.shape, "dtype": value.dtype}
        partitioner: Any = self._variable_partitioner
        try:
            if not value.dtype.is_floating or value.shape.rank == 0:
                self._variable_partitioner = None
            return made_partitioned(super()._create_variable(next_creator, **kwargs))
        finally:
            self._variable_partitioner = partitioner

    def _create_beside(
        self, reference: PartitionedVariable, next_creator: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Any:
        """Creates a slot of a split variable: split alike if it has the same shape, else on one server."""
        value = _initial_value(kwargs)
        kwargs |= {"initial_value": value, "shape": value.shape, "dtype": value.dtype}
        parent = super()._create_variable
        if value.shape == reference.shape:
            return partition_like(reference, lambda **own: parent(next_creator, **own), kwargs)
        return parent(next_creator, **kwargs | {"colocate_with": reference.variables[0]})

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """As in TensorFlow; a split variable is updated part by part (see `server_updates`)."""
        if not is_split(var) and (group or kwargs):
            return super().update(var, fn, args=args, kwargs=kwargs, group=group)
        function = functools.partial(fn, **kwargs) if kwargs else fn

        def one(variable: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
            return super(ParameterServerExtended, self).update(variable, function, args=given, group=False)

        # The operations of all parts are in the graph; their return values are not needed.
        return update(one, var, function, args)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self._num_replicas_in_sync == 1 and tf.executing_eagerly():
            # With one replica, batches are not divided. A coordinator copies the dataset to every worker. The
            # chief may iterate over it, too, which TensorFlow's distributed dataset refuses.
            return dataset
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        if self._num_replicas_in_sync == 1 and tf.executing_eagerly():
            return dataset_fn(tf.distribute.InputContext())
        return super()._distribute_datasets_from_function(dataset_fn, options)

    def _assert_being_scheduled_by_cluster_coordinator(self) -> None:
        """Does nothing: `run` and `reduce` are allowed outside of a coordinator, and compute on the chief."""


class ParameterServerStrategy(
    common.ReplicaRunner,
    tf.distribute.ParameterServerStrategy,  # type: ignore[misc]
):
    """Asynchronous training with parameter servers.

    As long as no process dies, every step is applied exactly once: `optimizer.iterations`, metrics and the
    number of examples are exact with any number of workers. When a worker dies, another worker runs its block
    of steps again (0.1 s of work times the number of workers, at most 0.4 s and 256 steps). The servers may
    have applied some of these steps already, so `iterations` can be too high by up to one block for each
    death. Metrics and evaluations count a block only when its results have reached the chief, so they stay
    exact.

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; None reads `TF_CONFIG`.
        variable_partitioner: splits variables over the servers, such as
            `tf.distribute.experimental.partitioners.MinSizePartitioner()`.
        max_staleness: the maximum number of updates between a step's read of the weights and its own update;
            None for no bound. With 0, training is synchronous: one step runs after another.
        overlap: whether a step computes while the previous step's gradients and the new weights are sent. Its
            weights then lack the worker's own last update, which `max_staleness` counts. So even with one
            worker, the results differ from those on one device.
        memory_growth: whether GPUs allocate memory as needed instead of all at once.
        gradient_hook: how `fit` sends gradients to the servers: "float16" or "bfloat16" sends them in 16
            bits; a `GradientHook` of your own; None sends them as they are.
        peer_timeout: seconds to wait for the other tasks. None uses `DTRAIN_PEER_TIMEOUT`; if that is not
            set, no limit under `dtrain launch`, 120 under `dtrain.spawn` and 300 elsewhere.

    Raises:
        ClusterConfigError: `TF_CONFIG` is missing, malformed, or lacks a worker or a server.
        PeerMissingError: a task did not answer in time.
        ConfigurationError: `max_staleness` is not an integer of at least 0 or is 0 with `overlap`,
            `overlap` is not a bool, or the gradient hook is not known or needs replicas.

    Example:
        ```python
        # train.py, to be run by: dtrain launch --workers 1 --ps 1 train.py
        import keras
        import numpy as np

        import dtrain

        strategy = dtrain.ParameterServerStrategy(max_staleness=4)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        max_staleness: int | None = None,
        overlap: bool = False,
        memory_growth: bool = True,
        gradient_hook: str | GradientHook | None = None,
        peer_timeout: float | None = None,
    ) -> None:
        _check_staleness(max_staleness, overlap)
        hook = server_hook_of(gradient_hook)
        topology = current() if cluster_resolver is None else _topology_of(cluster_resolver)
        if topology is None:
            raise ClusterConfigError(
                "ParameterServerStrategy needs a cluster, and TF_CONFIG is not set.",
                hint="start the program with `dtrain launch --workers 2 --ps 1 script.py`, or set TF_CONFIG",
            )
        if topology.task.job in ("worker", "ps"):
            serving.serve(topology)
        common.warn_of_servers(topology)
        with channel.rendezvous():
            serving.wait_for_servers(topology, timeout=peer_timeout)
        common.prepare(memory_growth=memory_growth, logical_cpus=False)
        by_program = cluster_resolver is not None
        if not by_program and not known_to_tensorflow():
            cluster_resolver = common.resolver_of(topology)
        resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if not topology.has_address:
            topology = serving.with_chief(topology)
            resolver = common.resolver_of(topology, resolver.rpc_layer)
        super().__init__(resolver, variable_partitioner)
        # TensorFlow's constructor creates its own extended object, and has no argument for another one.
        extended = ParameterServerExtended(self, resolver, variable_partitioner)
        tf.distribute.Strategy.__init__(self, extended)
        control.connect_chief(topology)
        join(topology, by_program=by_program)
        layout = ServerLayout(
            workers=len(topology.jobs["worker"]),
            max_staleness=max_staleness,
            servers=Servers(_HOME),
            overlap=overlap,
            gradient_hook=hook,
        )
        self.dtrain_managed = ManagedStrategy(layout=layout, asynchronous=ServerEngine(layout))
        strategy_made(self)
        channel.report_connected()

    def _weights_are_elsewhere(self) -> bool:
        return True


def _initial_value(kwargs: dict[str, Any]) -> tf.Tensor:
    value = kwargs["initial_value"]
    return tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))


def _check_staleness(bound: Any, overlap: Any) -> None:
    if not isinstance(overlap, bool):
        raise ConfigurationError(
            f"overlap is {overlap!r}, not True or False.",
            hint="with True, a step computes while the gradients of the one before it are still being sent",
        )
    if bound is None:
        return
    if not isinstance(bound, int) or isinstance(bound, bool) or bound < 0:
        raise ConfigurationError(
            f"max_staleness is {bound!r}, not an integer of at least 0.",
            hint="0 is synchronous; None does not bound it",
        )
    if overlap and bound == 0:
        raise ConfigurationError(
            "max_staleness=0 and overlap=True were set, but an overlapped step misses one update.",
            hint="set max_staleness to 1 or more, or leave overlap out",
        )


def _topology_of(resolver: Any) -> Topology | None:
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return None
    tasks = {job: tuple(addresses) for job, addresses in jobs.items()}
    return Topology(tasks, resolver.task_type or "chief", resolver.task_id or 0)
