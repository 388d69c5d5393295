"""Python functions of arrays as operations of a graph."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dtrain.errors import DtrainError
from dtrain.upstream import tensorflow_names
from dtrain.upstream.servers import register_python_function


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
            return [tensor_in(result) for result in results]
        self._live_as_long_as(tf.compat.v1.get_default_graph())
        return list(tf.raw_ops.PyFunc(input=list(values), token=self._token, Tout=list(kinds)))

    def _live_as_long_as(self, graph: Any) -> None:
        """Keeps the function alive as long as the outermost graph; inner graphs may be deleted earlier."""
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        if not hasattr(graph, "_dtrain_array_functions"):
            graph._dtrain_array_functions = {}
        graph._dtrain_array_functions[self._token] = self._called


def tensor_in(array: Any) -> Any:
    """A tensor in the memory of an aligned array, which must not be written to any more.

    `tf.convert_to_tensor` would copy it twice.
    """
    import tensorflow as tf

    return tf.raw_ops.Identity(input=array)


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
