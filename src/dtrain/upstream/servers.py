"""What TensorFlow has no public API for between processes: servers, calls from them, and TPU systems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dtrain.upstream import tensorflow_names
from dtrain.upstream.reach import set_methods


def current_worker() -> int | None:
    """The number of the worker on which this thread's eager operations run; None if it is no worker."""
    from tensorflow.python.eager import context

    match = re.search(r"/job:worker/replica:0/task:(\d+)", context.context().device_name or "")
    return int(match.group(1)) if match else None


def reduce_in_own_threads(extended: Any) -> None:
    """Makes the `extended` of a strategy of several workers use `eager_all_reduce` outside of graphs."""
    for operations in (extended._cross_device_ops, extended._host_cross_device_ops):
        set_methods(operations, tensorflow_names.EAGER_ALL_REDUCE)


def eager_all_reduce(operations: Any, reduce_op: Any, values: Sequence[Any], options: Any) -> list[Any]:
    """All-reduces values outside of graphs, with a thread for each device of this process.

    Args:
        operations: TensorFlow's `CollectiveAllReduce`.
        reduce_op: sum or mean.
        values: values with one component for each device.
        options: TensorFlow's options.
    """
    from tensorflow.python.distribute import distribute_utils
    from tensorflow.python.distribute import values as value_lib
    from tensorflow.python.eager import context

    devices = range(len(operations._devices))

    def of_device(device: int) -> Any:
        own = [value.values[device] for value in values]
        with context.eager_mode():
            return operations._all_reduce(reduce_op, own, device, options)

    # All devices run collectives in the same order, also those of other threads of this process.
    with operations._lock, ThreadPoolExecutor(len(devices)) as threads:
        by_device = [*threads.map(of_device, devices)]
    return [
        distribute_utils.regroup(totals, wrap_class=value_lib.Mirrored)
        for totals in zip(*by_device, strict=True)
    ]


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


def is_process_failure(error: BaseException) -> bool:
    """Whether an error means that a worker or a server is lost, and not that a step is wrong."""
    import tensorflow as tf

    if isinstance(error, tf.errors.CancelledError | tf.errors.DeadlineExceededError):
        return True
    return bool(
        tensorflow_names.WORKER_FAILURE.resolve()(error) or tensorflow_names.PS_FAILURE.resolve()(error)
    )


def google_will_terminate_machine() -> bool:
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
        function: takes and returns NumPy arrays, or is an instance of `tensorflow_names.CALLED_AS_IT_IS`. The
            caller must keep it alive. It is called in one of TensorFlow's threads.
    """
    from tensorflow.python.ops import script_ops

    script_ops._py_funcs._funcs[token] = function


def initialised_tpus() -> list[str]:
    """The names of the TPU systems that this process has initialised, oldest first."""
    from tensorflow.python.tpu import tpu_strategy_util

    return list(tpu_strategy_util.get_initialized_tpu_systems())


def tpu_is_initialised(resolver: Any) -> bool:
    """Whether this process has initialised the TPU system of a `TPUClusterResolver`.

    The list of TPU devices does not tell, because it contains devices before the system is initialised.
    """
    return str(resolver._tpu) in initialised_tpus()


def abort_collectives(message: str) -> None:
    """Ends all collectives of TensorFlow's own in this process, running and later ones, with an error."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(tf.errors.ABORTED, message)
