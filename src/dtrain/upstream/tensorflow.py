"""The private names of TensorFlow that dtrain uses or replaces, each with its reason.

TensorFlow's strategies can only be subclassed through `tensorflow.python`: the classes of `extended`, which
does the work, and of variables have no public names. The subclasses are in `strategies/`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.upstream.reach import Reach, Replaced, SetOnObjects

_VALUES = "tensorflow.python.distribute.values"
_VALUES_UTIL = "tensorflow.python.distribute.values_util"
_MIRRORED = "tensorflow.python.distribute.mirrored_strategy"
_REPLICAS = "tensorflow.python.distribute.mirrored_run"
_COLLECTIVE = "tensorflow.python.distribute.collective_all_reduce_strategy"

TAPE_GRADIENT = Replaced(
    "tensorflow.python.eager.backprop:GradientTape.gradient",
    "a step's gradients are the whole batch's from here on, so what a user does to them is right",
    "tf#33929",
)
FILTER_GRADIENT = Replaced(
    "tensorflow.python.ops.gen_nn_ops:conv2d_backprop_filter",
    "one kernel for CPUs ends the process on odd numbers of examples, which replicas have",
)
MIRRORED_EXTENDED = Reach(
    f"{_MIRRORED}:MirroredExtended", "the only place where a strategy's variables and updates can be changed"
)
COLLECTIVE_EXTENDED = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended", "as MirroredExtended, for several workers"
)
CREATE_VARIABLE = Reach(
    f"{_MIRRORED}:MirroredExtended._create_variable",
    "variables that a replica can update alone once the gradients are reduced",
)
INITIAL_VALUE = Reach(
    f"{_MIRRORED}:MirroredExtended._get_variable_creator_initial_value",
    "gives every replica the whole initial value of a variable that is summed over them",
)
USE_MERGE_CALL = Reach(
    f"{_MIRRORED}:MirroredExtended._use_merge_call",
    "merge_call cannot stand inside cond; after the reduction no merge is needed",
    "keras#20582",
)
LOCAL_DEVICES = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended._initialize_local_devices",
    "a worker without a GPU may have several logical CPUs",
)
MIRRORED_VARIABLE = Reach(f"{_VALUES}:MirroredVariable", "the class of variables under a strategy")
UPDATE_REPLICA = Reach(
    f"{_VALUES}:MirroredVariable._update_replica",
    "writes to a variable in a replica must be seen, and be local after the reduction",
)
GET_REPLICA = Reach(
    f"{_VALUES}:DistributedVariable._get_replica",
    "a centrally stored variable is the same one for every replica",
)
SYNC_ON_READ = Reach(
    f"{_VALUES}:SyncOnReadVariable", "metrics are summed over the replicas when they are read"
)
WRITE_SUMMED = Replaced(
    f"{_VALUES_UTIL}:on_read_assign_cross_replica",
    "cuts an integer into equal parts and drops the rest: a count of 1 becomes 0 on two replicas",
)
RESTORE_SUMMED = Replaced(
    f"{_VALUES_UTIL}:get_on_read_restore_ops", "as WRITE_SUMMED, for a checkpoint of TensorFlow's"
)
PER_REPLICA = Reach(f"{_VALUES}:PerReplica", "hands each replica its part of a batch inside a graph")
REPLICA_THREADS = Replaced(
    f"{_REPLICAS}:_call_for_each_replica",
    "replicas' threads take turns with the same Python objects: each is given attributes of its own",
)
MERGE_CALL = SetOnObjects(
    f"{_REPLICAS}:_MirroredReplicaContext._merge_call",
    "the one place where a replica's turn ends before its function does",
)
REDUCTION_TO_ONE = Reach(
    "tensorflow.python.distribute.cross_device_ops:ReductionToOneDevice",
    "on one machine's CPUs a plain sum needs no collective keys, which a second strategy would share",
    "tf#62790",
)
RUN_REPLICAS = Reach(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",
    "a replica function that is a tf.function itself must be unwrapped inside another",
)
FUNCTION_CALL = Replaced(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
    "replicas cannot meet in a function of the user's own inside a step, which is part of the step",
)
FUNCTION_CLONE = Reach(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._clone",
    "what a function traced in one block on a worker holds variables that the next one does not have",
)
FROM_FUNCTION = Reach(
    "tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction",
    "its cardinality counts one replica's batches, not steps",
)
PY_FUNCTIONS = Reach(
    "tensorflow.python.ops.script_ops:FuncRegistry.get",
    "the chief calls a function of a server by its name, over the connection that TensorFlow has",
)
PS_EXTENDED = Reach(
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended",
    "where variables are made, and how updates of one worker stay together",
    "keras#18624",
)
RESOURCE_VARIABLE = Reach(
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable",
    "a variable that lives inside one call of a function has no public constructor",
)
STATELESS_UNIFORM = Replaced(
    "tensorflow.python.ops.stateless_random_ops:stateless_random_uniform",
    "under XLA the same seed gives other numbers, and so other masks of dropout",
)
CLUSTER_SCHEDULE = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.schedule",
    "a block is done when the chief has its results, so fetching them is part of what may run again",
)
WORKER_FAILURE = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_is_worker_failure",
    "an error of a step is the user's; one of a lost process means that its block must run elsewhere",
)
PS_FAILURE = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_is_ps_failure", "as WORKER_FAILURE"
)
RESOURCE_DELETER = Reach(
    "tensorflow.python.ops.resource_variable_ops:EagerResourceDeleter.__del__",
    "when the interpreter ends, a variable is deleted on its server, which may not answer any more",
)
COORDINATOR_DELETER = Reach(
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator.__del__",
    "it waits for a lock that is held while the coordinator waits for a lost worker to come back",
)
REMOVE_FUNCTION = Reach(
    "tensorflow.python.eager.context:Context.remove_function",
    "as RESOURCE_DELETER: a function is removed on every server",
)
RUN_INDEPENDENTLY = Reach(
    "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.run_independently",
    "a clock that is read in a step must not cost a message between worker and servers",
)
_CONTEXT = "tensorflow.python.distribute.distribute_lib"
LONE_MERGE_CALL = Reach(
    f"{_CONTEXT}:ReplicaContextBase._merge_call",
    "a replica that is tried out alone has nobody to be merged with",
)
REDUCE_TO = Reach(
    f"{_CONTEXT}:StrategyExtendedV2._reduce_to", "as LONE_MERGE_CALL: what it reduces there is its own value"
)
BATCH_REDUCE_TO = Reach(f"{_CONTEXT}:StrategyExtendedV2._batch_reduce_to", "as REDUCE_TO")
GATHER_TO = Reach(f"{_CONTEXT}:StrategyExtendedV2._gather_to", "as REDUCE_TO")
GET_FUNCTION = Reach(
    "tensorflow.python.framework.ops:Graph._get_function",
    "whether a function that a step calls draws random numbers",
)
SHARDED_VARIABLE = Reach(
    "tensorflow.python.distribute.sharded_variable:ShardedVariable",
    "Keras needs more of a variable that a partitioner has split",
)


def per_replica(values: Sequence[Any]) -> Any:
    """Combines one value for each local replica to an argument of `strategy.run`; keeps nested structures.

    Args:
        values: one (nested) value for each replica; a single one is returned unchanged.
    """
    if len(values) == 1:
        return values[0]
    from tensorflow.python.distribute import distribute_utils

    return distribute_utils.regroup(tuple(values), always_wrap=True)


def graph_of_function(graph: Any, name: str) -> Any:
    """The graph of the function `name` that operations of `graph` call; None if it is not known."""
    return getattr(GET_FUNCTION.resolve()(graph, name), "graph", None)


def merge_possible() -> bool:
    """Whether `merge_call` can be used here: not inside a nested `tf.function`, a condition or a loop."""
    import threading

    from tensorflow.python.framework import ops

    graph = getattr(threading.current_thread(), "graph", None)
    return graph is None or ops.get_default_graph() is graph


@contextlib.contextmanager
def reducing_nothing(strategy: Any, whole: Callable[[Any], Any]) -> Iterator[None]:
    """Makes a strategy's reduce and gather methods, inside the context, use this replica's value only.

    Args:
        strategy: the strategy.
        whole: computes the result of a reduction or gather from the value.
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
    """Whether deterministic operations are enabled; XLA does not support this for all operations."""
    from tensorflow.python.framework.config import is_op_determinism_enabled

    return bool(is_op_determinism_enabled())


def in_xla_graph() -> bool:
    """Whether this code is traced inside a function that XLA compiles."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def replica_id() -> Any:
    """The global number of the current replica: an int, or a tensor under several workers."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group if context is not None else 0


def local_replica_index() -> int:
    """The number of the current replica among the replicas of this process."""
    from tensorflow.python.distribute import values_util

    return values_util.get_current_replica_id_as_int() or 0


def set_shared(key: str, value: str) -> None:
    """Publishes a value to all workers of the job, through TensorFlow's coordination service.

    The service has no authentication: any process that reaches the first worker's port can read, set and
    delete values.

    Raises:
        tf.errors.AlreadyExistsError: the key has a value.
    """
    from tensorflow.python.eager import context

    context.context().set_config_key_value(key, value)


def get_shared(key: str, timeout_ms: int) -> str:
    """Waits for a value that a worker publishes by `set_shared`, at most `timeout_ms` milliseconds.

    Raises:
        tf.errors.DeadlineExceededError: no worker has published it in time.
    """
    from tensorflow.python.eager import context

    return str(context.context().get_config_key_value(key, timeout_ms))


def delete_shared(key: str) -> None:
    """Deletes a value that a worker has published by `set_shared`."""
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
    """Whether a distributed dataset was made from a function: then its elements are one replica's batches."""
    return isinstance(dataset, FROM_FUNCTION.resolve())


def initialised_tpus() -> list[str]:
    """The names of the TPU systems that this process has initialised, oldest first."""
    from tensorflow.python.tpu import tpu_strategy_util

    return list(tpu_strategy_util.get_initialized_tpu_systems())


def tpu_is_initialised(resolver: Any) -> bool:
    """Whether this process has initialised the TPU system of a `TPUClusterResolver`.

    The list of TPU devices does not tell, because it contains devices before the system is initialised.
    """
    return str(resolver._tpu) in initialised_tpus()


def current_worker() -> int | None:
    """The number of the worker on which this thread's eager operations run; None if it is no worker."""
    from tensorflow.python.eager import context

    found = re.search(r"/job:worker/replica:0/task:(\d+)", context.context().device_name or "")
    return int(found.group(1)) if found else None


def own_executor() -> Any:
    """Creates an executor for this thread's eager operations, and returns it.

    By default, all threads of a process share one executor. After an operation on a lost server, it keeps the
    error, and raises it in the next thread that uses it. Call `clear_error()` on the returned executor after
    such an error.
    """
    from tensorflow.python.eager import context, executor

    own = executor.new_executor(enable_async=False)
    context.context().executor = own
    return own


def abandon_servers() -> None:
    """Makes TensorFlow delete nothing on servers any more; for the end of a process whose server is lost.

    At the end of the interpreter, TensorFlow deletes functions, variables and its context on all servers, and
    waits for their answers without a limit. If the context were deleted, a thread that waits for a server
    would get an error and return into an interpreter that has ended, which aborts the process.
    """
    import ctypes

    from tensorflow.python.eager import context

    def nothing(*args: Any) -> None:
        pass

    for reach in (RESOURCE_DELETER, COORDINATOR_DELETER, REMOVE_FUNCTION):
        setattr(reach.holder(), reach.name, nothing)
    # This reference keeps the context from being deleted.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.context()))


def schedule(coordinator: Any, function: Any) -> None:
    """Schedules a Python function on a thread of the chief whose eager operations run on a worker.

    If that worker dies, the function is called again for another worker.
    """
    coordinator._cluster.schedule(function, None, None)


def blames_a_process(error: BaseException) -> bool:
    """Whether an error means that a worker or a server is lost, and not that a step is wrong."""
    import tensorflow as tf

    if isinstance(error, tf.errors.CancelledError | tf.errors.DeadlineExceededError):
        return True
    return bool(WORKER_FAILURE.resolve()(error) or PS_FAILURE.resolve()(error))


def same_function_untraced(function: Any) -> Any:
    """A new `tf.function` with the same Python function and options, and without any trace."""
    return FUNCTION_CLONE.resolve()(function, None)


def call_inline(function: Any, original: Any, args: Any, kwds: Any) -> Any:
    """Calls a `tf.function` inline: its operations become part of the calling graph.

    AutoGraph converts the Python function if the `tf.function` would do so.

    Args:
        function: a `tf.function` that XLA does not compile. A function of a saved model is called by
            `original` instead.
        original: TensorFlow's `Function.__call__`.
        args: the arguments.
        kwds: the keyword arguments.

    Returns:
        What `function` would return.
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
    """Converts numbers, arrays and variables to tensors, as a `tf.function` does with its results."""
    import numpy as np
    import tensorflow as tf

    plain = bool | int | float | complex | str | bytes | np.ndarray | np.generic | tf.Variable
    return tf.convert_to_tensor(value) if isinstance(value, plain) else value


def known_before(value: Any) -> Any:
    """Evaluates a tensor of the function that is being traced outside of it, without its arguments.

    Args:
        value: a symbolic tensor; anything else is returned unchanged.

    Returns:
        An eager tensor.

    Raises:
        ValueError: the tensor depends on the function's arguments.
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
    """A handle for a variable that is created anew in each call of the function that is being traced."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    with tf.init_scope():
        name = context.anonymous_name()
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, container="")


def in_no_order(operation: Any) -> None:
    """Frees an operation from the program order of stateful operations in the function that is being traced.

    TensorFlow runs all stateful operations that use no variable in program order, across devices too.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def variable_on(device: str, value: Any, dtype: Any, name: str | None) -> Any:
    """Creates a plain variable on one device, even inside the scope of a strategy.

    Args:
        device: the name of the device.
        value: the initial value: an array, or a function that returns one.
        dtype: the dtype of the variable.
        name: the name of the variable, or None.
    """
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    with tf.device(device):
        return ResourceVariable(value, trainable=False, dtype=dtype, name=name)


def not_recording() -> Any:
    """A context in which gradient tapes record no operations; they still watch variables that are read."""
    from tensorflow.python.eager import record

    return record.stop_recording()


def set_aggregation(variable: Any, aggregation: Any) -> None:
    """Changes how the replicas' values of a sync-on-read variable are combined."""
    variable._aggregation = aggregation


def mark_converted(function: Any) -> None:
    """Makes AutoGraph call a function unconverted, but still convert the functions that it calls."""
    function.autograph_info__ = {}


def converted_as_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a function by AutoGraph if the calling code was converted, as in a user's `tf.function`."""
    import tensorflow as tf

    context = tf.__internal__.autograph.control_status_ctx()
    if context.status.name != "ENABLED" or not inspect.isfunction(function):
        return function
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(function, context)
    return converted


def container_of(component: Any) -> Any:
    """The distributed variable that contains one replica's variable; the variable itself if there is none."""
    container = getattr(component, "_distributed_container", None) or getattr(
        component.handle, "_distributed_container", None
    )
    return (container() if container is not None else None) or component


def creation_number(variable: Any) -> int:
    """A number that increases with each variable that the process creates.

    In processes that run the same program, the same variables have the same order.
    """
    digits = re.search(r"(\d+)$", str(variable._unique_id))
    return int(digits.group()) if digits else 0


def replica_spec(spec: Any, replica: int) -> Any:
    """One local replica's part of a distributed dataset's spec; other specs are returned unchanged."""
    each = getattr(spec, "_value_specs", None)
    return spec if each is None else each[replica]


def compiled_by_xla(function: Any) -> bool:
    """Whether a `tf.function` was made with `jit_compile=True`."""
    return bool(getattr(function, "_jit_compile", False))


def google_will_take_machine() -> bool:
    """Whether Google Cloud's metadata server says that host maintenance will terminate this machine.

    It uses only the watcher of TensorFlow's preemption handler: the handler itself saves a
    `tf.train.Checkpoint`, without the position in the data.

    Raises:
        OSError: no metadata server answers.
    """
    from tensorflow.python.distribute.failure_handling import failure_handling_util

    return bool(failure_handling_util.termination_watcher_function_gce())


def lacks_python_function(error: BaseException) -> bool:
    """Whether `tf.raw_ops.PyFunc` failed because its function is not registered in the other process."""
    import tensorflow as tf

    return isinstance(error, tf.errors.InvalidArgumentError) and "Could not find callback" in error.message


def register_python_function(token: str, function: Any) -> None:
    """Registers a function for other processes, which call it by `tf.raw_ops.PyFunc` on a device of this one.

    Args:
        token: the name of the function.
        function: takes and returns NumPy arrays, or is an instance of `collectives.CALLED_AS_IT_IS`. The
            caller must keep it alive. It is called in one of TensorFlow's threads.
    """
    from tensorflow.python.ops import script_ops

    script_ops._py_funcs._funcs[token] = function
