"""What TensorFlow has no public API for within a process: replicas, functions, graphs and variables.

The names that are reached by a path stand in `tensorflow_names.py`. What goes on between processes is in
`processes.py`, and what concerns data in `datasets.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.upstream import tensorflow_names


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
    return getattr(tensorflow_names.GET_FUNCTION.resolve()(graph, name), "graph", None)


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
        tensorflow_names.REDUCE_TO.name: lambda op, value, *rest, **more: whole(value),
        tensorflow_names.BATCH_REDUCE_TO.name: lambda op, pairs, *rest, **more: [
            whole(value) for value, _ in pairs
        ],
        tensorflow_names.GATHER_TO.name: lambda value, *rest, **more: whole(value),
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


def global_seed() -> int | None:
    """The seed that `tf.random.set_seed` set, or None."""
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return None if seed is None else int(seed)


def yields_replica_batches(dataset: Any) -> bool:
    """Whether a distributed dataset was made from a function: then its elements are one replica's batches."""
    return isinstance(dataset, tensorflow_names.FROM_FUNCTION.resolve())


def initialised_tpus() -> list[str]:
    """The names of the TPU systems that this process has initialised, oldest first."""
    from tensorflow.python.tpu import tpu_strategy_util

    return list(tpu_strategy_util.get_initialized_tpu_systems())


def tpu_is_initialised(resolver: Any) -> bool:
    """Whether this process has initialised the TPU system of a `TPUClusterResolver`.

    The list of TPU devices does not tell, because it contains devices before the system is initialised.
    """
    return str(resolver._tpu) in initialised_tpus()


def same_function_untraced(function: Any) -> Any:
    """A new `tf.function` with the same Python function and options, and without any trace."""
    return tensorflow_names.FUNCTION_CLONE.resolve()(function, None)


def same_function(function: Any, python_function: Callable[..., Any]) -> Any:
    """A new `tf.function` with the same options, of a Python function that AutoGraph does not convert."""
    mark_converted(python_function)
    return tensorflow_names.FUNCTION_CLONE.resolve()(function, python_function)


def converted_for_replicas(function: Callable[..., Any]) -> Any:
    """Converts a function by AutoGraph as TensorFlow does before it calls it for each replica."""
    import tensorflow as tf

    if tf.executing_eagerly():
        return function
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


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

    if type(function) is not tensorflow_names.FUNCTION_CALL.holder():
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


@contextlib.contextmanager
def writes_whole(variable: Any) -> Iterator[bool]:
    """Enters a sync-on-read variable's strategy; yields whether a write here is of the whole value.

    Otherwise it is of the current replica's part, or of the only copy that is saved.
    """
    from tensorflow.python.distribute import distribute_lib, values_util

    if values_util.is_saving_non_distributed():
        yield False
        return
    with distribute_lib.enter_or_assert_strategy(variable.distribute_strategy):
        whole = distribute_lib.in_cross_replica_context() and not values_util.in_replica_update_context()
        if whole:
            values_util.mark_as_unsaveable()
        yield whole


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


# The optimizer sets this attribute on a sum that it has created by merging sums, and does not merge it again.
_JOINED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(values: Sequence[Any]) -> Any:
    """Sums tensors from the first to the last, with the same bits in every run.

    `tf.add_n` of three or more tensors does not guarantee the order: its kernel starts with the first tensor
    whose memory it can reuse, which depends on timing. A sum of two has only one result, but the graph
    optimizer merges nested sums into one. So each sum of two is marked as already merged.

    Args:
        values: at least one tensor, all of one shape; one for each replica, for example.
    """
    import tensorflow as tf

    total = tf.add_n(values[:1])
    for value in values[1:]:
        total = tf.add_n([total, value])
        if not tf.executing_eagerly():
            tensorflow_names.SET_ATTRIBUTE.resolve()(total.op, _JOINED, tf.compat.v1.AttrValue(b=True))
    return total


def optimized(graph: Any, wanted: Sequence[Any]) -> Any:
    """Optimizes a graph as TensorFlow does before a run: inlines functions, fuses operations and so on.

    Args:
        graph: a `tf.Graph`, which is not changed.
        wanted: the operations and tensors of the graph that must be computed; they keep their names.

    Returns:
        A new `tf.Graph`.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    meta = v1.MetaGraphDef(graph_def=graph.as_graph_def())
    meta.collection_def["train_op"].node_list.value.extend(each.name for each in wanted)
    config = v1.ConfigProto()
    # Without a description of the machine, the optimizer assumes too little memory, and trades time for it.
    config.graph_options.rewrite_options.memory_optimization = 1  # NO_MEM_OPT
    found = tensorflow_names.OPTIMIZE_GRAPH.resolve()(config, meta, verbose=False)
    made = tf.Graph()
    with made.as_default():
        tf.import_graph_def(found, name="")
    return made
