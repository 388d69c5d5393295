"""What TensorFlow has no public API for between processes: collectives and servers."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dtrain.upstream import tensorflow_names


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

    for reach in (
        tensorflow_names.RESOURCE_DELETER,
        tensorflow_names.COORDINATOR_DELETER,
        tensorflow_names.REMOVE_FUNCTION,
    ):
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
    return bool(
        tensorflow_names.WORKER_FAILURE.resolve()(error) or tensorflow_names.PS_FAILURE.resolve()(error)
    )


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
                _stay_known()
                return function(*args)

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
            found = self._function(*(value.numpy() for value in values))
            return [tf.convert_to_tensor(each) for each in found]
        self._live_as_long_as(tf.compat.v1.get_default_graph())
        return list(tf.raw_ops.PyFunc(input=list(values), token=self._token, Tout=list(kinds)))

    def _live_as_long_as(self, graph: Any) -> None:
        """Keeps the function alive as long as the outermost graph; inner graphs may be deleted earlier."""
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        if not hasattr(graph, "_dtrain_array_functions"):
            graph._dtrain_array_functions = {}
        graph._dtrain_array_functions[self._token] = self._called


_numbers = itertools.count()
_known = threading.local()
_kept: set[int] = set()
_MOST_KEPT = 16  # threads: each one adds to the stacks that are printed for a hanging process


def _stay_known() -> None:
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
