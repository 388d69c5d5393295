"""What TensorFlow has no public API for about code that it traces: its context, order and sums.

Functions and their graphs are in `graph_functions.py`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dtrain.upstream import tensorflow_names


def deterministic_operations() -> bool:
    """Whether deterministic operations are enabled: XLA lacks operations then, and graphs have no clock."""
    from tensorflow.python.framework.config import is_op_determinism_enabled

    return bool(is_op_determinism_enabled())


def in_xla_graph() -> bool:
    """Whether this code is traced inside a function that XLA compiles."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def global_seed() -> int | None:
    """The seed that `tf.random.set_seed` set, or None."""
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return None if seed is None else int(seed)


def in_no_order(operation: Any) -> None:
    """Frees an operation from the program order of stateful operations in the function that is being traced.

    TensorFlow runs all stateful operations that use no variable in program order, across devices too.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def tape_records() -> bool:
    """Whether a gradient tape may record operations here."""
    from tensorflow.python.eager import record

    return bool(record.could_possibly_record())


def not_recording() -> Any:
    """A context in which gradient tapes record no operations; they still watch variables that are read."""
    from tensorflow.python.eager import record

    return record.stop_recording()


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
