"""Shared parts of dtrain's strategies: starting the engine, running replica functions, classes of variables.

The variable classes are TensorFlow's own, with two additions: the training step sees their writes, and a
replica can update them alone. They add no state, so what is saved is the same as in TensorFlow. Each strategy
decides itself on which devices its replicas and variables are.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.fit.memory_advice import memory_explained
from dtrain.engine.install import install
from dtrain.engine.replica.context import reported_replicas
from dtrain.engine.replica.replica_threads import with_own_attributes
from dtrain.engine.replica.replica_writes import note_write
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.variables import host_writes
from dtrain.environments.topology import Topology
from dtrain.errors import StepError
from dtrain.interfaces.managed_strategy import managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import check_distribution, scope_entered
from dtrain.process_group.secret import on_loopback
from dtrain.strategies import devices
from dtrain.upstream import graph_functions, tensorflow_names, tf_variables
from dtrain.upstream.tf_tracing import sum_in_order

# TensorFlow's default is 1 for every strategy: the collectives of a second strategy in a process would then
# use the keys of the first. All workers create their strategies in the same order, so they count alike.
_key_bases = itertools.count(1)
_KEYS_A_STRATEGY = 1_000_000

_Function: Any = tensorflow_names.RUN_REPLICAS.resolve()
Mirrored: Any = tensorflow_names.MIRRORED_VARIABLE.resolve()
_SyncOnRead: Any = tensorflow_names.SYNC_ON_READ.resolve()


def prepare(*, memory_growth: bool = True, logical_cpus: bool = True) -> None:
    """Installs the engine under Keras and prepares the devices; called before a strategy is created.

    Args:
        memory_growth: whether GPUs allocate memory as needed instead of all at once.
        logical_cpus: whether to split the CPU into as many logical CPUs as the launcher was asked for.

    Raises:
        DeviceError: TensorFlow has started with another number of logical CPUs.
        ConfigurationError: `keras.distribution` has a distribution.
    """
    install()
    check_distribution()
    devices.prepare(memory_growth=memory_growth, logical_cpus=logical_cpus)


def next_collective_key_base() -> int:
    """The first key of a range of collective keys that no other strategy of this process uses."""
    return next(_key_bases) * _KEYS_A_STRATEGY


def sum_on_one_device() -> Any:
    """A `CrossDeviceOps` that sums on one device, in the order of the replicas, without collectives."""
    return tensorflow_names.REDUCTION_TO_ONE.resolve()(accumulation_fn=sum_in_order)


def resolver_of(topology: Topology, rpc_layer: str | None = None) -> Any:
    """A `ClusterResolver` for a topology that does not come from `TF_CONFIG`."""
    jobs = {job: list(addresses) for job, addresses in topology.jobs.items()}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=topology.task_type,
        task_id=topology.task_index,
        rpc_layer=rpc_layer or "grpc",
    )


def warn_of_servers(topology: Topology) -> None:
    """Warns that TensorFlow's servers of a job can be reached from other machines; one task calls it."""
    if not on_loopback(topology):
        logger.warning(
            "TensorFlow's servers of this job listen on all interfaces, without authentication: whoever "
            "reaches their ports can do what this user can. Hint: let only the job's machines reach them; "
            "see docs/security.md."
        )


class ReplicaRunner:
    """Mixin for strategies with several replicas: `run` also takes a `tf.function` as replica function."""

    def scope(self) -> Any:
        """As `tf.distribute.Strategy.scope`."""
        scope_entered()
        return super().scope()  # type: ignore[misc]

    @property
    def num_replicas_in_sync(self) -> int:
        """As in `tf.distribute.Strategy`; 1 in a step of `fit`, which is traced as one device's program.

        In a job with a quorum, the replicas of all workers count, as a batch is divided among them.
        """
        members: int = getattr(getattr(getattr(self, "dtrain_managed", None), "layout", None), "members", 1)
        return reported_replicas(members * super().num_replicas_in_sync)  # type: ignore[misc]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """As `tf.distribute.Strategy.run`; inside a graph, a `tf.function` becomes part of that graph.

        Raises:
            StepError: it is called inside a step of `fit`, which is divided over the replicas already.
        """
        if thread_state.single_program:
            raise StepError(
                "strategy.run was called inside a step of fit, evaluate or predict, which the replicas "
                "compute together already.",
                hint="compute with the whole batch, as on one device; strategy.run is for a loop of your own",
            )
        if is_tf_function(fn) and graph_functions.compiled_by_xla(fn) and self._weights_are_elsewhere():
            logger.warning(
                "jit_compile=True was set for a replica function, but what XLA compiles reads weights on its "
                "own device only, and under %s they are on another. It runs without XLA.",
                type(self).__name__,
            )
            fn = fn.python_function  # type: ignore[attr-defined]
        elif is_tf_function(fn) and not tf.executing_eagerly() and not graph_functions.compiled_by_xla(fn):
            # Replicas cannot synchronise inside a function that each replica traces separately.
            fn = fn.python_function  # type: ignore[attr-defined]
        return super().run(fn, args=args, kwargs=kwargs, options=options)  # type: ignore[misc]

    def _weights_are_elsewhere(self) -> bool:
        return bool(self.dtrain_managed.layout.central)  # type: ignore[attr-defined]


class LocalUpdates:
    """Mixin for a strategy's `extended`: replicas have attributes of their own, and can update alone."""

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function in a thread for each replica, with attributes of objects of the replica's own."""
        replicas: int = self._layout.local_replicas
        call = super()._call_for_each_replica  # type: ignore[misc]
        if replicas == 1:
            return call(fn, args, kwargs)
        if not is_tf_function(fn):
            return call(
                with_own_attributes(graph_functions.converted_for_replicas(fn), replicas), args, kwargs
            )
        if graph_functions.compiled_by_xla(fn) and all("GPU" in device for device in self.worker_devices):  # type: ignore[attr-defined]
            return call(with_own_attributes(fn, replicas), args, kwargs)
        # As in TensorFlow, the replicas run inside of one function with the options of the given one.
        traced = self._traced.get(fn)
        if traced is None:
            python_function = fn.python_function
            traced = graph_functions.same_function(
                fn, lambda *args, **kwargs: self._call_for_each_replica(python_function, args, kwargs)
            )
            self._traced[fn] = traced
        return traced(*args, **kwargs)

    @functools.cached_property
    def _traced(self) -> weakref.WeakKeyDictionary[Any, Any]:
        """The `tf.function`s that were called for each replica, with those that run the replicas."""
        return weakref.WeakKeyDictionary()

    def _use_merge_call(self) -> bool:
        if thread_state.updating_locally or thread_state.single_program:
            return False
        return super()._use_merge_call()  # type: ignore[misc]

    def update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True) -> Any:
        """As in TensorFlow; in a step that is traced as one device's program, of the only copy."""
        if thread_state.single_program:
            return fn(var, *args, **(kwargs or {}))
        return super().update(var, fn, args, kwargs, group)  # type: ignore[misc]

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        with memory_explained(self._container_strategy()):  # type: ignore[attr-defined]
            made = remade(super()._create_variable(next_creator, **kwargs))  # type: ignore[misc]
        self.dtrain_variables[next(self._numbers)] = made
        return made

    @functools.cached_property
    def dtrain_variables(self) -> weakref.WeakValueDictionary[int, Any]:
        """The strategy's variables, by the numbers in which they were made: the same on all workers."""
        return weakref.WeakValueDictionary()

    @functools.cached_property
    def _numbers(self) -> Iterator[int]:
        return itertools.count()

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str | None, primary_var: Any, **kwargs: Any
    ) -> Any:
        """The initial value on one replica: the first worker's, which dtrain's transport broadcasts.

        A summed variable has its value on replica 0, zeros on others.
        """
        calls = managed(self._container_strategy()).calls  # type: ignore[attr-defined]
        if calls is not None and replica_id == 0:
            initial: Any = lambda: calls.broadcast(tf_variables.initial_value(kwargs))  # noqa: E731
        else:
            initial = super()._get_variable_creator_initial_value(  # type: ignore[misc]
                replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
            )
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        summed = on_read and kwargs.get("aggregation") == tf.VariableAggregation.SUM
        if not summed or self._layout.first_replica + replica_id == 0:
            return initial
        return lambda: tf.zeros_like(initial() if callable(initial) else initial)

    @property
    def _layout(self) -> ReplicaLayout:
        layout: ReplicaLayout = self._container_strategy().dtrain_managed.layout  # type: ignore[attr-defined]
        return layout


def is_tf_function(fn: Any) -> bool:
    """Whether a callable is the result of `tf.function`."""
    return isinstance(fn, _Function)


class ReadAsNumber:
    """Mixin: converts a distributed variable to an array or a number, as a plain `tf.Variable` does."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype=dtype)  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]


class WithEntries:
    """Mixin: reads and writes single entries, which TensorFlow's distributed variables cannot.

    Outside of steps all copies are written. In a step that is traced as on one device, this is its variable's
    own method.
    """

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """As `tf.Variable.gather_nd`."""
        return tf.gather_nd(tf.convert_to_tensor(self), indices, name=name)

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """As `tf.Variable.scatter_nd_add`."""
        return self._written("scatter_nd_add", indices, updates, name)

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """As `tf.Variable.scatter_nd_sub`."""
        return self._written("scatter_nd_sub", indices, updates, name)

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """As `tf.Variable.scatter_nd_update`."""
        return self._written("scatter_nd_update", indices, updates, name)

    def _written(self, method: str, indices: Any, updates: Any, name: str | None) -> Any:
        aggregated = self.aggregation != tf.VariableAggregation.NONE  # type: ignore[attr-defined]
        if aggregated and tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            raise StepError(
                f"{method} on the variable {self.name!r} in strategy.run: the entries that replicas "  # type: ignore[attr-defined]
                "write cannot be aggregated.",
                hint="write to it outside of strategy.run, or create it with tf.VariableAggregation.NONE",
            )

        def write(copy: Any, given: tuple[Any, Any]) -> Any:
            return getattr(copy, method)(*given, name)

        return self._update(write, (indices, updates))  # type: ignore[attr-defined]


class ReplicatedVariable(ReadAsNumber, WithEntries, Mirrored):  # type: ignore[misc]
    """A variable with one copy for each replica."""

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        note_host_write(self, value)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if self.aggregation == tf.VariableAggregation.NONE:
            note_write(self)
        if thread_state.updating_locally:
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


class SummedVariable(ReadAsNumber, _SyncOnRead):  # type: ignore[misc]
    """A variable of which each replica holds a part, such as a metric's; reading it combines the parts.

    TensorFlow divides a sum that is written equally among the replicas, even an integer that their number
    does not divide: a count of 1 would become 0 on two replicas. Here the first replica gets the remainder.
    """

    def assign(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """As TensorFlow's, but exact for an integer that replicas sum."""
        with tf_variables.writes_whole(self) as whole:
            if whole:
                note_host_write(self, value)
            if whole and self._sums_integers():
                written = self._write_parts(value)
                if not read_value:
                    return written
                with tf.control_dependencies([] if written is None else [written]):
                    return self.read_value()
        return super().assign(value, use_locking, name, read_value)

    def _gather_saveables_for_checkpoint(self) -> Any:
        factories = super()._gather_saveables_for_checkpoint()
        return {key: functools.partial(self._saveable, make) for key, make in factories.items()}

    def _saveable(self, make: Callable[..., Any], **kwargs: Any) -> Any:
        """What saves and restores the variable in a checkpoint of TensorFlow's."""
        made = make(**kwargs)
        restore = made.restore

        def exact(restored_tensors: Any, restored_shapes: Any) -> Any:
            if self._sums_integers():
                return self._write_parts(restored_tensors[0])
            return restore(restored_tensors, restored_shapes)

        made.restore = exact
        return made

    def _sums_integers(self) -> bool:
        return bool(self.dtype.is_integer and self.aggregation == tf.VariableAggregation.SUM)

    def _write_parts(self, whole: Any) -> Any:
        """Gives each replica an equal part of an integer, and the first one of the job the remainder too."""
        layout = self.distribute_strategy.dtrain_managed.layout
        whole = tf.cast(whole, self.dtype)
        part = whole // layout.replicas
        first = whole - part * (layout.replicas - 1)
        replicas = enumerate(self.values, layout.first_replica)
        return tf.group([copy.assign(first if number == 0 else part) for number, copy in replicas])


def note_host_write(variable: Any, value: Any) -> None:
    """Notes what the program writes to all replicas of a variable at once; in a graph, nothing is noted."""
    if tf.executing_eagerly() and variable.distribute_strategy.dtrain_managed.layout.workers > 1:
        host_writes.note(variable.name, value)


def remade(variable: Any, mirrored: type = ReplicatedVariable) -> Any:
    """Makes a variable of dtrain's class, with the copies of one that TensorFlow's strategy created.

    TensorFlow has no way to specify the class to create.

    Args:
        variable: what TensorFlow created; of any other class, it is returned unchanged.
        mirrored: the class in place of TensorFlow's mirrored variables.
    """
    own = {Mirrored: mirrored, _SyncOnRead: SummedVariable}.get(type(variable))
    return own(variable.distribute_strategy, variable.values, variable.aggregation) if own else variable
