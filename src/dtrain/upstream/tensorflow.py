"""The private names of TensorFlow that dtrain uses or replaces, each with its reason.

TensorFlow's strategies can only be subclassed through `tensorflow.python`: the part that does the work
(`extended`) and the variable classes have no public name.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.upstream.reach import Reach

_VALUES = "tensorflow.python.distribute.values"
_VALUES_UTIL = "tensorflow.python.distribute.values_util"
_MIRRORED = "tensorflow.python.distribute.mirrored_strategy"
_REPLICAS = "tensorflow.python.distribute.mirrored_run"
_COLLECTIVE = "tensorflow.python.distribute.collective_all_reduce_strategy"

TAPE_GRADIENT = Reach(
    module="tensorflow.python.eager.backprop", owner="GradientTape", name="gradient",
    signature=(
        "(self, target, sources, output_gradients=None, "
        "unconnected_gradients=<UnconnectedGradients.NONE: 'none'>)"
    ),
    reason="a step's gradients are the whole batch's from here on, so what a user does to them is right",
    thread="tf#33929",
)  # fmt: skip
FILTER_GRADIENT = Reach(
    module="tensorflow.python.ops.gen_nn_ops", name="conv2d_backprop_filter",
    signature=(
        "(input: Annotated[Any, ~TV_Conv2DBackpropFilter_T], filter_sizes: Annotated[Any, "
        "<class 'tensorflow.security.fuzzing.py.annotation_types.Int32'>], out_backprop: Annotated[Any, "
        "~TV_Conv2DBackpropFilter_T], strides, padding: str, use_cudnn_on_gpu: bool = True, "
        "explicit_paddings=[], data_format: str = 'NHWC', dilations=[1, 1, 1, 1], name=None) -> "
        "Annotated[Any, ~TV_Conv2DBackpropFilter_T]"
    ),
    reason="one kernel for CPUs ends the process on odd numbers of examples, which replicas have",
)  # fmt: skip
MIRRORED_EXTENDED = Reach(
    module=_MIRRORED, name="MirroredExtended",
    signature="(container_strategy, devices=None, cross_device_ops=None)",
    reason="the only place where a strategy's variables and updates can be changed",
)  # fmt: skip
COLLECTIVE_EXTENDED = Reach(
    module=_COLLECTIVE, name="CollectiveAllReduceExtended",
    signature="(container_strategy, cluster_resolver, communication_options, devices=None)",
    reason="as MirroredExtended, for several workers",
)  # fmt: skip
CREATE_VARIABLE = Reach(
    module=_MIRRORED, owner="MirroredExtended", name="_create_variable",
    signature="(self, next_creator, **kwargs)",
    reason="variables that a replica can update alone once the gradients are reduced",
)  # fmt: skip
INITIAL_VALUE = Reach(
    module=_MIRRORED, owner="MirroredExtended", name="_get_variable_creator_initial_value",
    signature="(self, replica_id, device, primary_var, **kwargs)",
    reason="gives every replica the whole initial value of a variable that is summed over them",
)  # fmt: skip
USE_MERGE_CALL = Reach(
    module=_MIRRORED, owner="MirroredExtended", name="_use_merge_call", signature="(self)",
    reason="merge_call cannot stand inside cond; after the reduction no merge is needed",
    thread="keras#20582",
)  # fmt: skip
LOCAL_DEVICES = Reach(
    module=_COLLECTIVE, owner="CollectiveAllReduceExtended", name="_initialize_local_devices",
    signature="(self, cluster_resolver, worker_device)",
    reason="a worker without a GPU may have several logical CPUs",
)  # fmt: skip
MIRRORED_VARIABLE = Reach(
    module=_VALUES, name="MirroredVariable", signature="(strategy, values, aggregation, var_policy=None)",
    reason="the class of variables under a strategy",
)  # fmt: skip
UPDATE_REPLICA = Reach(
    module=_VALUES, owner="MirroredVariable", name="_update_replica",
    signature="(self, update_fn, value, **kwargs)",
    reason="writes to a variable in a replica must be seen, and be local after the reduction",
)  # fmt: skip
GET_REPLICA = Reach(
    module=_VALUES, owner="DistributedVariable", name="_get_replica", signature="(self, replica_id)",
    reason="a centrally stored variable is the same one for every replica",
)  # fmt: skip
SYNC_ON_READ = Reach(
    module=_VALUES, name="SyncOnReadVariable", signature="(strategy, values, aggregation, var_policy=None)",
    reason="metrics are summed over the replicas when they are read",
)  # fmt: skip
WRITE_SUMMED = Reach(
    module=_VALUES_UTIL, name="on_read_assign_cross_replica", signature="(var, value, read_value=True)",
    reason="cuts an integer into equal parts and drops the rest: a count of 1 becomes 0 on two replicas",
)  # fmt: skip
RESTORE_SUMMED = Reach(
    module=_VALUES_UTIL, name="get_on_read_restore_ops", signature="(var, tensor, aggregation)",
    reason="as WRITE_SUMMED, for a checkpoint of TensorFlow's",
)  # fmt: skip
PER_REPLICA = Reach(
    module=_VALUES, name="PerReplica", signature="(values)",
    reason="hands each replica its part of a batch inside a graph",
)  # fmt: skip
REPLICA_THREADS = Reach(
    module=_REPLICAS, name="_call_for_each_replica", signature="(distribution, fn, args, kwargs)",
    reason="replicas' threads take turns with the same Python objects: each is given attributes of its own",
)  # fmt: skip
MERGE_CALL = Reach(
    module=_REPLICAS, owner="_MirroredReplicaContext", name="_merge_call",
    signature="(self, fn, args, kwargs)",
    reason="the one place where a replica's turn ends before its function does",
)  # fmt: skip
REDUCTION_TO_ONE = Reach(
    module="tensorflow.python.distribute.cross_device_ops", name="ReductionToOneDevice",
    signature="(reduce_to_device=None, accumulation_fn=None)",
    reason="on one machine's CPUs a plain sum needs no collective keys, which a second strategy would share",
    thread="tf#62790",
)  # fmt: skip
RUN_REPLICAS = Reach(
    module="tensorflow.python.eager.polymorphic_function.polymorphic_function", name="Function",
    signature=(
        "(python_function, name, input_signature=None, autograph=True, jit_compile=None, "
        "reduce_retracing=False, experimental_implements=None, experimental_autograph_options=None, "
        "experimental_attributes=None)"
    ),
    reason="a replica function that is a tf.function itself must be unwrapped inside another",
)  # fmt: skip
FUNCTION_CALL = Reach(
    module="tensorflow.python.eager.polymorphic_function.polymorphic_function", owner="Function",
    name="__call__", signature="(self, *args, **kwds)",
    reason="replicas cannot meet in a function of the user's own inside a step, which is part of the step",
)  # fmt: skip
FUNCTION_CLONE = Reach(
    module="tensorflow.python.eager.polymorphic_function.polymorphic_function", owner="Function",
    name="_clone", signature="(self, python_function)",
    reason="what a function traced in one block on a worker holds variables that the next one does not have",
)  # fmt: skip
FROM_FUNCTION = Reach(
    module="tensorflow.python.distribute.input_lib", name="DistributedDatasetsFromFunction",
    signature=(
        "(input_workers, strategy, input_contexts=None, dataset_fn=None, options=None, components=None, "
        "element_spec=None, build=True, replica_order=None)"
    ),
    reason="its cardinality counts one replica's batches, not steps",
)  # fmt: skip
PY_FUNCTIONS = Reach(
    module="tensorflow.python.ops.script_ops", owner="FuncRegistry", name="get",
    signature="(self, token, default=None)",
    reason="the chief calls a function of a server by its name, over the connection that TensorFlow has",
)  # fmt: skip
PS_EXTENDED = Reach(
    module="tensorflow.python.distribute.parameter_server_strategy_v2",
    name="ParameterServerStrategyV2Extended",
    signature=(
        "(container_strategy, cluster_resolver: tensorflow.python.distribute.cluster_resolver."
        "cluster_resolver.ClusterResolver, variable_partitioner)"
    ),
    reason="where variables are made, and how updates of one worker stay together",
    thread="keras#18624",
)  # fmt: skip
RESOURCE_VARIABLE = Reach(
    module="tensorflow.python.ops.resource_variable_ops", name="BaseResourceVariable",
    signature=(
        "(trainable=None, shape=None, dtype=None, handle=None, constraint=None, "
        "synchronization=None, aggregation=None, distribute_strategy=None, name=None, "
        "unique_id=None, handle_name=None, graph_element=None, initial_value=None, "
        "initializer_op=None, is_initialized_op=None, cached_value=None, save_slice_info=None, "
        "caching_device=None, in_graph_mode=None, validate_shape=True, **unused_kwargs)"
    ),
    reason="a variable that lives inside one call of a function has no public constructor",
)  # fmt: skip
STATELESS_UNIFORM = Reach(
    module="tensorflow.python.ops.stateless_random_ops", name="stateless_random_uniform",
    signature=(
        "(shape, seed, minval=0, maxval=None, dtype=tf.float32, name=None, alg='auto_select')"
    ),
    reason="under XLA the same seed gives other numbers, and so other masks of dropout",
)  # fmt: skip
CLUSTER_SCHEDULE = Reach(
    module="tensorflow.python.distribute.coordinator.cluster_coordinator", owner="Cluster", name="schedule",
    signature="(self, function, args, kwargs)",
    reason="a block is done when the chief has its results, so fetching them is part of what may run again",
)  # fmt: skip
WORKER_FAILURE = Reach(
    module="tensorflow.python.distribute.coordinator.cluster_coordinator", name="_is_worker_failure",
    signature="(error)",
    reason="an error of a step is the user's; one of a lost process means that its block must run elsewhere",
)  # fmt: skip
PS_FAILURE = Reach(
    module="tensorflow.python.distribute.coordinator.cluster_coordinator", name="_is_ps_failure",
    signature="(error)",
    reason="as WORKER_FAILURE",
)  # fmt: skip
RESOURCE_DELETER = Reach(
    module="tensorflow.python.ops.resource_variable_ops", owner="EagerResourceDeleter", name="__del__",
    signature="(self)",
    reason="when the interpreter ends, a variable is deleted on its server, which may not answer any more",
)  # fmt: skip
COORDINATOR_DELETER = Reach(
    module="tensorflow.python.distribute.coordinator.cluster_coordinator", owner="ClusterCoordinator",
    name="__del__", signature="(self)",
    reason="it waits for a lock that is held while the coordinator waits for a lost worker to come back",
)  # fmt: skip
REMOVE_FUNCTION = Reach(
    module="tensorflow.python.eager.context", owner="Context", name="remove_function",
    signature="(self, name)",
    reason="as RESOURCE_DELETER: a function is removed on every server",
)  # fmt: skip
RUN_INDEPENDENTLY = Reach(
    module="tensorflow.python.framework.auto_control_deps", owner="AutomaticControlDependencies",
    name="run_independently", signature="(self, op)",
    reason="a clock that is read in a step must not cost a message between worker and servers",
)  # fmt: skip
_CONTEXT = "tensorflow.python.distribute.distribute_lib"
LONE_MERGE_CALL = Reach(
    module=_CONTEXT, owner="ReplicaContextBase", name="_merge_call",
    signature="(self, merge_fn, args, kwargs)",
    reason="a replica that is tried out alone has nobody to be merged with",
)  # fmt: skip
REDUCE_TO = Reach(
    module=_CONTEXT, owner="StrategyExtendedV2", name="_reduce_to",
    signature="(self, reduce_op, value, destinations, options)",
    reason="as LONE_MERGE_CALL: what it reduces there is its own value",
)  # fmt: skip
BATCH_REDUCE_TO = Reach(
    module=_CONTEXT, owner="StrategyExtendedV2", name="_batch_reduce_to",
    signature="(self, reduce_op, value_destination_pairs, options)",
    reason="as REDUCE_TO",
)  # fmt: skip
GATHER_TO = Reach(
    module=_CONTEXT, owner="StrategyExtendedV2", name="_gather_to",
    signature="(self, value, destinations, axis, options=None)",
    reason="as REDUCE_TO",
)  # fmt: skip
GET_FUNCTION = Reach(
    module="tensorflow.python.framework.ops", owner="Graph", name="_get_function", signature="(self, name)",
    reason="whether a function that a step calls draws random numbers",
)  # fmt: skip
SHARDED_VARIABLE = Reach(
    module="tensorflow.python.distribute.sharded_variable", name="ShardedVariable",
    signature="(variables, name='ShardedVariable')",
    reason="Keras needs more of a variable that a partitioner has split",
)  # fmt: skip

REACHES: tuple[Reach, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Reach))


def per_replica(values: Sequence[Any]) -> Any:
    """One value for each local replica, as `strategy.run` takes them; structures are kept.

    Args:
        values: one (nested) value a replica; with one replica it is returned as it is.
    """
    if len(values) == 1:
        return values[0]
    from tensorflow.python.distribute import distribute_utils

    return distribute_utils.regroup(tuple(values), always_wrap=True)


def graph_of_function(graph: Any, name: str) -> Any:
    """The graph of a function that operations of a graph call, or None."""
    return getattr(GET_FUNCTION.resolve()(graph, name), "graph", None)


def merge_possible() -> bool:
    """Whether replicas can be joined here: not inside a nested tf.function, cond or loop."""
    import threading

    from tensorflow.python.framework import ops

    graph = getattr(threading.current_thread(), "graph", None)
    return graph is None or ops.get_default_graph() is graph


@contextlib.contextmanager
def reducing_nothing(strategy: Any, whole: Callable[[Any], Any]) -> Iterator[None]:
    """While it is entered, a strategy reduces and gathers one replica's values alone.

    Args:
        strategy: whose `reduce`, `gather` and the like are meant.
        whole: what becomes of a value.
    """
    alone = {
        REDUCE_TO.name: lambda op, value, *rest, **more: whole(value),
        BATCH_REDUCE_TO.name: lambda op, pairs, *rest, **more: [whole(value) for value, _ in pairs],
        GATHER_TO.name: lambda value, *rest, **more: whole(value),
    }
    vars(strategy.extended).update(alone)
    try:
        yield
    finally:
        for name in alone:
            del vars(strategy.extended)[name]


def deterministic_operations() -> bool:
    """Whether operations were set to be deterministic, which XLA does not have for all of them."""
    from tensorflow.python.framework.config import is_op_determinism_enabled

    return bool(is_op_determinism_enabled())


def in_xla_graph() -> bool:
    """Whether the code runs inside a function that XLA compiles."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def replica_id() -> Any:
    """The global number of the replica that runs now: an int, or a tensor under several workers."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group if context is not None else 0


def local_replica_index() -> int:
    """The number of the replica that runs now among those of this process."""
    from tensorflow.python.distribute import values_util

    return values_util.get_current_replica_id_as_int() or 0


def set_shared(key: str, value: str) -> None:
    """Publishes a value to all workers of the job, through TensorFlow's coordination service.

    The service asks nobody who he is: whoever reaches the first worker's port may read, set and delete.

    Raises:
        tf.errors.AlreadyExistsError: the key has a value.
    """
    from tensorflow.python.eager import context

    context.context().set_config_key_value(key, value)


def get_shared(key: str, timeout_ms: int) -> str:
    """Waits for a value that a worker publishes.

    Raises:
        tf.errors.DeadlineExceededError: nobody published it in time.
    """
    from tensorflow.python.eager import context

    return str(context.context().get_config_key_value(key, timeout_ms))


def delete_shared(key: str) -> None:
    """Removes a value that a worker has published."""
    from tensorflow.python.eager import context

    context.context().delete_config_key_value(key)


def global_seed() -> int | None:
    """The seed that `tf.random.set_seed` set, or None."""
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return None if seed is None else int(seed)


def connected() -> bool:
    """Whether TensorFlow's coordination service connects this process with others."""
    from tensorflow.python.eager import context

    return context.context().coordination_service is not None


def yields_replica_batches(dataset: Any) -> bool:
    """Whether a distributed dataset's elements are one replica's batches, as those made from a function."""
    return isinstance(dataset, FROM_FUNCTION.resolve())


def initialised_tpus() -> list[str]:
    """The names of the TPU systems that this process has initialised, oldest first."""
    from tensorflow.python.tpu import tpu_strategy_util

    return list(tpu_strategy_util.get_initialized_tpu_systems())


def tpu_is_initialised(resolver: Any) -> bool:
    """Whether this process has initialised the TPU system of a `TPUClusterResolver`.

    A list of TPU devices does not tell: they are listed before the system is initialised.
    """
    return str(resolver._tpu) in initialised_tpus()


def current_worker() -> int | None:
    """The number of the worker that eager operations of this thread run on; None if on none."""
    from tensorflow.python.eager import context

    found = re.search(r"/job:worker/replica:0/task:(\d+)", context.context().device_name or "")
    return int(found.group(1)) if found else None


def own_executor() -> Any:
    """Gives this thread's eager operations an executor of their own, and returns it.

    The threads of a process share one, and it keeps the error of an operation on a server that was lost:
    whichever thread comes next would get it. Call `clear_error()` on this one after such an error.
    """
    from tensorflow.python.eager import context, executor

    own = executor.new_executor(enable_async=False)
    context.context().executor = own
    return own


def abandon_servers() -> None:
    """The interpreter is about to end, and some server does not answer: nothing is deleted on servers.

    TensorFlow deletes functions, variables and its context on all of them, and waits for the answers without
    a limit. A thread that waits for a server gets an error when the context goes, and comes back into an
    interpreter that has ended, which aborts the process.
    """
    import ctypes

    from tensorflow.python.eager import context

    def nothing(*args: Any) -> None:
        pass

    for reach in (RESOURCE_DELETER, COORDINATOR_DELETER, REMOVE_FUNCTION):
        setattr(reach.holder(), reach.name, nothing)
    # The context is not deleted as long as somebody refers to it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.context()))


def schedule(coordinator: Any, function: Any) -> None:
    """Has a Python function run on a thread of the chief's whose eager operations go to a worker.

    If that worker dies, the function is run again for another one.
    """
    coordinator._cluster.schedule(function, None, None)


def blames_a_process(error: BaseException) -> bool:
    """Whether an error says that a worker or a server is lost, rather than that a step went wrong."""
    import tensorflow as tf

    if isinstance(error, tf.errors.CancelledError | tf.errors.DeadlineExceededError):
        return True
    return bool(WORKER_FAILURE.resolve()(error) or PS_FAILURE.resolve()(error))


def same_function_untraced(function: Any) -> Any:
    """A `tf.function` of the same Python function and options that has traced nothing yet."""
    return FUNCTION_CLONE.resolve()(function, None)


def call_inline(function: Any, original: Any, args: Any, kwds: Any) -> Any:
    """What a `tf.function` returns, computed in the graph that calls it, and converted by AutoGraph.

    Args:
        function: a `tf.function`, not compiled by XLA. One of a saved model is called by `original`.
        original: its `__call__`.
        args: the arguments.
        kwds: the keyword arguments.
    """
    import tensorflow as tf
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.eager.polymorphic_function import autograph_util

    if type(function) is not FUNCTION_CALL.holder():
        return original(function, *args, **kwds)
    python_function = function.python_function
    status = ag_ctx.Status.ENABLED if function._autograph else ag_ctx.Status.DISABLED
    options = function._experimental_autograph_options
    if function._autograph:
        python_function = autograph_util.py_func_from_autograph(python_function, options)
    args, kwds = tf.nest.map_structure(_argument, (args, kwds))
    signature = function.input_signature
    if signature is not None and len(signature) == len(args):
        args = tuple(
            tf.nest.map_structure(_of_spec, spec, arg) for spec, arg in zip(signature, args, strict=True)
        )
    with ag_ctx.ControlStatusCtx(status=status, options=options):
        found = python_function(*args, **kwds)
    return tf.nest.map_structure(_result, found)


def _argument(value: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _of_spec(spec: Any, value: Any) -> Any:
    import tensorflow as tf

    if not isinstance(spec, tf.TensorSpec) or isinstance(value, tf.Tensor):
        return value
    return tf.convert_to_tensor(value, spec.dtype)


def _result(value: Any) -> Any:
    """A function of TensorFlow's returns tensors, also for numbers and variables."""
    import numpy as np
    import tensorflow as tf

    plain = bool | int | float | complex | str | bytes | np.ndarray | np.generic | tf.Variable
    return tf.convert_to_tensor(value) if isinstance(value, plain) else value


def known_before(value: Any) -> Any:
    """What a function that is traced computes without its arguments, as it is outside of the function.

    Args:
        value: a tensor; anything else is returned as it is.

    Raises:
        ValueError: it depends on the function's arguments.
    """
    import tensorflow as tf
    from tensorflow.python.eager import lift_to_graph
    from tensorflow.python.ops.op_selector import UnliftableError

    if not isinstance(value, tf.Tensor) or hasattr(value, "numpy"):
        return value

    def again() -> Any:
        graph = tf.compat.v1.get_default_graph()
        return lift_to_graph.lift_to_graph([value], graph)[value]

    try:
        with tf.init_scope():
            return tf.function(again, autograph=False)()
    except UnliftableError as error:
        raise ValueError(f"{value.name} is not known before the function runs") from error


def unnamed_variable_handle(dtype: Any, shape: Any) -> Any:
    """A handle, made anew in every call of the function that is traced, for a variable of that call."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    with tf.init_scope():
        name = context.anonymous_name()
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container="")


def in_no_order(operation: Any) -> None:
    """An operation of a function that is traced need not wait for others with effects, nor they for it.

    TensorFlow keeps all those that touch no variable in the order of the program, over devices too.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def variable_on(device: str, value: Any, dtype: Any, name: str | None) -> Any:
    """A plain variable on one device, also inside the scope of a strategy.

    Args:
        device: its name.
        value: an array, or a function that gives one.
        dtype: of the variable.
        name: of the variable.
    """
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    with tf.device(device):
        return ResourceVariable(value, trainable=False, dtype=dtype, name=name)


def not_recording() -> Any:
    """While it is entered, no tape notes what is computed; variables that are read are still noticed."""
    from tensorflow.python.eager import record

    return record.stop_recording()


def set_aggregation(variable: Any, aggregation: Any) -> None:
    """Says anew how the replicas' values of a variable that is combined on reading make one."""
    variable._aggregation = aggregation


def mark_converted(function: Any) -> None:
    """AutoGraph calls a function as it is, without telling what it calls that AutoGraph is off."""
    function.autograph_info__ = {}


def converted_as_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as AutoGraph makes it where the code runs now: converted in a user's `tf.function`."""
    import tensorflow as tf

    context = tf.__internal__.autograph.control_status_ctx()
    if context.status.name != "ENABLED" or not inspect.isfunction(function):
        return function
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(function, context)
    return converted


def container_of(component: Any) -> Any:
    """The distributed variable that one replica's variable is part of; itself where there is none."""
    container = getattr(component, "_distributed_container", None) or getattr(
        component.handle, "_distributed_container", None
    )
    return (container() if container is not None else None) or component


def creation_number(variable: Any) -> int:
    """A number that grows in the order in which a process makes its variables.

    Processes that run the same program give the same variables the same order.
    """
    digits = re.search(r"(\d+)$", str(variable._unique_id))
    return int(digits.group()) if digits else 0


def replica_spec(spec: Any, replica: int) -> Any:
    """One local replica's part of a distributed dataset's spec; other specs are returned as they are."""
    each = getattr(spec, "_value_specs", None)
    return spec if each is None else each[replica]


def compiled_by_xla(function: Any) -> bool:
    """Whether a `tf.function` was made with `jit_compile=True`."""
    return bool(getattr(function, "_jit_compile", False))


def google_will_take_machine() -> bool:
    """Whether Google Cloud's metadata server says that this machine will be taken away.

    TensorFlow's own watcher, behind its handler of preemptions; the handler itself saves by
    `tf.train.Checkpoint` and knows nothing of where the data is.

    Raises:
        OSError: no server answers.
    """
    from tensorflow.python.distribute.failure_handling import failure_handling_util

    return bool(failure_handling_util.termination_watcher_function_gce())


def lacks_python_function(error: BaseException) -> bool:
    """Whether `tf.raw_ops.PyFunc` failed because nobody has made its function callable in that process."""
    import tensorflow as tf

    return isinstance(error, tf.errors.InvalidArgumentError) and "Could not find callback" in error.message


def register_python_function(token: str, function: Any) -> None:
    """Makes a function callable from other processes of the cluster, by `tf.raw_ops.PyFunc` on a device here.

    Args:
        token: its name.
        function: takes and returns NumPy arrays, or is a `collectives.CALLED_AS_IT_IS`; it must be kept alive
            by the caller. It is called in a thread of TensorFlow's.
    """
    from tensorflow.python.ops import script_ops

    script_ops._py_funcs._funcs[token] = function
