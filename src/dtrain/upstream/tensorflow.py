"""What TensorFlow has no public API for within a process: replicas, variables, and what they combine.

The names that are reached by a path stand in `tensorflow_names.py`. Functions and graphs are in
`graph_functions.py`, what concerns servers in `servers.py`, and data in `tf_data.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.errors import DtrainError
from dtrain.upstream import tensorflow_names
from dtrain.upstream.keras import value_of
from dtrain.upstream.servers import register_python_function


def per_replica(values: Sequence[Any]) -> Any:
    """Combines one value for each local replica to an argument of `strategy.run`; keeps nested structures.

    Args:
        values: one (nested) value for each replica; a single one is returned unchanged.
    """
    if len(values) == 1:
        return values[0]
    from tensorflow.python.distribute import distribute_utils

    return distribute_utils.regroup(tuple(values), always_wrap=True)


def merge_possible() -> bool:
    """Whether `merge_call` can be used here: not inside a nested `tf.function`, a condition or a loop."""
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
    """Whether deterministic operations are enabled: XLA lacks operations then, and graphs have no clock."""
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


def underlying(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable, or behind one replica's component of it."""
    import tensorflow as tf

    if isinstance(variable, tf.distribute.DistributedValues):
        return variable
    value = value_of(variable)
    # Ask it for no attribute: a variable that is summed on reading looks up what it lacks in its value, and
    # reading that value is an all-reduce over all workers.
    if isinstance(value, tf.distribute.DistributedValues):
        return value
    if getattr(value, "is_sharded_variable", False) is True:
        return value
    inner = value if isinstance(value, tf.Variable) else variable
    if isinstance(inner, tf.distribute.DistributedValues) or not isinstance(inner, tf.Variable):
        return inner
    return container_of(inner)


def made_for_each_model(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of a model's step, or of another part of its training, whose graphs end with the model.

    It is without AutoGraph, and TensorFlow does not say that it is traced too often. TensorFlow counts the
    traces of one Python function. A program with several models, such as a cross-validation, traces dtrain's
    functions once for each of them, and can do nothing about it.
    """
    import tensorflow as tf

    @functools.wraps(function)
    def traced(*args: Any, **kwds: Any) -> Any:
        outputs = function(*args, **kwds)
        if not tf.executing_eagerly():
            _keep_gradients_in(tf.compat.v1.get_default_graph())
        return outputs

    compiled = tf.function(traced, autograph=False, **options)
    compiled._omit_frequent_tracing_warning = True
    return compiled


def _keep_gradients_in(graph: Any) -> None:
    """Makes the gradients that `tf.custom_gradient` registered for a graph's operations end with the graph.

    TensorFlow keeps them as long as the process lives, and with them the graph (tf#27492, tf#97697): 23 MB
    for a small model on two replicas. `all_reduce` and several activations, such as `silu`, have one.

    Args:
        graph: the graph; its branches and loops are looked at too. The functions that it calls are not: the
            graph of a user's function may live on, to be called by other models.
    """
    from tensorflow.python.framework import ops

    registered = ops.gradient_registry._registry
    for operation in graph.get_operations():
        if operation.type == "IdentityN":
            name = operation.node_def.attr["_gradient_op_type"].s.decode()
            if not name.startswith("CustomGradient-") or name not in registered:
                continue
            gradient = registered[name]["type"]
            graph._dtrain_gradients = [*getattr(graph, "_dtrain_gradients", ()), gradient]
            registered[name] = {**registered[name], "type": _kept_elsewhere(gradient)}
            weakref.finalize(graph, registered.pop, name, None).atexit = False
        for inner in filter(None, (getattr(operation, attribute, None) for attribute in _INNER_GRAPHS)):
            _keep_gradients_in(inner)


_INNER_GRAPHS = ("_cond_graph", "_body_graph", "_true_graph", "_false_graph")


def _kept_elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another one, and does not keep it."""
    held: Any = weakref.ref(function)
    return lambda *args: held()(*args)


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
    specs = getattr(spec, "_value_specs", None)
    return spec if specs is None else specs[replica]


# The optimizer sets this attribute on a sum that it has created by merging sums, and does not merge it again.
JOINED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"
"""The attribute of a sum that keeps the graph optimizer from merging it with the sums that it reads."""


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
            tensorflow_names.SET_ATTRIBUTE.resolve()(total.op, JOINED, tf.compat.v1.AttrValue(b=True))
    return total


class ArrayFunction:
    """A Python function of arrays as a graph operation, like `tf.numpy_function`, but twice as fast.

    Outside of graphs, the function is called directly, so that its exceptions reach the caller unchanged.

    Args:
        function: takes arrays, and returns a list of at least one contiguous array of numbers.
    """

    def __init__(self, function: Callable[..., list[Any]]) -> None:
        class Called(tensorflow_names.CALLED_AS_IT_IS.resolve()):  # type: ignore[misc]
            def __init__(self) -> None:
                """Skips the base class's constructor, whose work for tensors is not needed."""

            def __call__(self, device: str, token: str, args: list[Any]) -> list[Any]:
                _keep_thread_state()
                try:
                    return function(*args)
                except DtrainError as error:
                    global _raised
                    # TensorFlow prints the traceback twice. The message says all that a user can do about it.
                    _raised = error.with_traceback(None)
                    raise _raised from None

        self._function = function
        self._called = Called()
        self._token = f"dtrain_array_function_{next(_numbers)}"
        register_python_function(self._token, self._called)

    def __call__(self, values: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
        """Calls the function with tensors; TensorFlow never prunes the operation.

        Args:
            values: the tensors.
            kinds: the dtypes of the results.

        Returns:
            The results as tensors; in a graph, their shapes are unknown.
        """
        import tensorflow as tf

        if tf.executing_eagerly():
            results = self._function(*(value.numpy() for value in values))
            return [tf.convert_to_tensor(result) for result in results]
        self._live_as_long_as(tf.compat.v1.get_default_graph())
        return list(tf.raw_ops.PyFunc(input=list(values), token=self._token, Tout=list(kinds)))

    def _live_as_long_as(self, graph: Any) -> None:
        """Keeps the function alive as long as the outermost graph; inner graphs may be deleted earlier."""
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        if not hasattr(graph, "_dtrain_array_functions"):
            graph._dtrain_array_functions = {}
        graph._dtrain_array_functions[self._token] = self._called


def error_of_array_function(error: Exception) -> DtrainError | None:
    """The exception of an `ArrayFunction` in whose place TensorFlow raised this error, or None."""
    return _raised if _raised is not None and str(_raised) in str(error) else None


_raised: DtrainError | None = None  # what an `ArrayFunction` raised last
_numbers = itertools.count()
_known = threading.local()
_kept: set[int] = set()
_MOST_KEPT = 16  # threads: each one adds to the stacks that are printed for a hanging process


def _keep_thread_state() -> None:
    """Keeps Python's state for this TensorFlow thread, which Python would otherwise create at each call.

    Creating and deleting it maps and unmaps memory, which takes as long as a small all-reduce.
    """
    if not hasattr(_known, "here") and len(_kept) < _MOST_KEPT:
        _known.here = True
        _kept.add(threading.get_ident())
        ctypes.pythonapi.PyGILState_Ensure()  # never released


def replace_launchers(extended: Any, make: Callable[..., Any]) -> None:
    """Replaces a strategy's launchers of collectives, one for each local device.

    Args:
        extended: the `extended` of a multi-worker strategy, before its first reduction.
        make: takes the arguments of TensorFlow's launcher, and returns the new launcher.
    """
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        operations._launchers = [
            make(old._group_key, old._group_size, old._collective_keys, old._device, old._options)
            for old in operations._launchers
        ]


def initial_value(arguments: dict[str, Any]) -> Any:
    """The initial value of a variable as a tensor, from the arguments of its creator."""
    import tensorflow as tf
    from tensorflow.python.trackable import base

    value = arguments["initial_value"]
    if callable(value):
        value = value()
    if isinstance(value, base.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=arguments.get("dtype"))
