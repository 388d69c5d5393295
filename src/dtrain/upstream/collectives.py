"""The private names of TensorFlow's collectives that dtrain uses to run its own collective calls.

TensorFlow has no public API to choose the transport of a strategy's all-reduce. The transports are in
`dtrain.collectives`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.upstream.reach import Reach
from dtrain.upstream.tensorflow import register_python_function

_COLLECTIVE = "tensorflow.python.distribute.collective_all_reduce_strategy"
_UTILS = "tensorflow.python.distribute.cross_device_utils"

LAUNCHER = Reach(
    f"{_UTILS}:CollectiveReplicaLauncher",
    "the one place through which a strategy's sums and gatherings go",
    "tf#60245",
)
INITIAL_VALUE = Reach(
    f"{_COLLECTIVE}:CollectiveAllReduceExtended._get_variable_creator_initial_value",
    "the first worker's initial values go to the others by the chosen transport too",
)

CALLED_AS_IT_IS = Reach(
    "tensorflow.python.ops.script_ops:EagerFunc",
    "Python functions that graphs call with the arguments as they come: the checks of numpy_function take "
    "longer than a small sum",
)


class ArrayFunction:
    """A Python function of arrays as a graph operation, like `tf.numpy_function`, but twice as fast.

    Outside of graphs, the function is called directly, so that its exceptions reach the caller unchanged.

    Args:
        function: takes arrays, and returns a list of at least one contiguous array of numbers.
    """

    def __init__(self, function: Callable[..., list[Any]]) -> None:
        class Called(CALLED_AS_IT_IS.resolve()):  # type: ignore[misc]
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


def lost_tasks(jobs: Mapping[str, int]) -> list[str]:
    """The tasks that TensorFlow's coordination service has lost, as text with the reason.

    Args:
        jobs: how many tasks each of the service's jobs has, by the name of the job.
    """
    from tensorflow.python.eager import context

    names = [f"{job} {index}" for job, count in jobs.items() for index in range(count)]
    states = context.context().get_task_states([*jobs.items()])
    return [f"{name} ({state})" for name, state in zip(names, states, strict=True) if state is not None]


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
