"""What TensorFlow has no public API for about functions: conversion, inlining, graphs and their operations.

`tf_replicas.py` and `tf_variables.py` have what concerns replicas and variables.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.upstream import tensorflow_names

_DEVICE = "XLA_CPU_JIT"


def operations_of_xla() -> frozenset[str]:
    """The types of the operations that XLA for CPUs can compile; empty before it has compiled anything."""
    from tensorflow.python.framework import kernels

    registered = kernels.get_all_registered_kernels().kernel
    return frozenset(kernel.op for kernel in registered if kernel.device_type == _DEVICE)


_WRITES = ("Assign", "ResourceApply", "ResourceScatter")


def writes_without_inputs(function: Any) -> Any:
    """What a traced function writes into variables though its arguments are not there yet.

    Args:
        function: a `ConcreteFunction`.

    Returns:
        A `ConcreteFunction` without arguments that writes the same; None if all depends on the arguments.
    """
    import tensorflow as tf

    graph = function.graph
    outside = {inner.op.name: outer for outer, inner in graph.captures}
    waiting = {tensor.op.name for tensor in graph.inputs} - set(outside)
    size = -1
    while size != len(waiting):
        size = len(waiting)
        for op in graph.get_operations():
            before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
            if any(earlier.name in waiting for earlier in before):
                waiting.add(op.name)
    names = [
        op.name for op in graph.get_operations() if op.type.startswith(_WRITES) and op.name not in waiting
    ]
    if not names:
        return None
    part = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), names)
    captured = {node.name: outside[node.name] for node in part.node if node.name in outside}

    def write() -> None:
        own = tf.compat.v1.get_default_graph()
        handles = {f"{name}:0": own.capture(outer) for name, outer in captured.items()}
        tf.graph_util.import_graph_def(part, input_map=handles, name="")

    return tf.function(write, autograph=False).get_concrete_function()


def called_functions(operation: Any) -> list[str]:
    """The names of the functions that an operation calls, such as the branches of a condition."""
    names = []
    for attribute in operation.node_def.attr.values():
        names += [attribute.func.name] if attribute.WhichOneof("value") == "func" else []
        names += [function.name for function in attribute.list.func]
    return names


def operations_run(graph: Any) -> Iterator[Any]:
    """The operations that a function runs, also inside the functions that it calls.

    They are those that its results need, and those with effects.
    """
    yield from _operations_run(graph, set())


def _operations_run(graph: Any, seen: set[str]) -> Iterator[Any]:
    waiting = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    needed = {operation.name for operation in waiting}
    while waiting:
        operation = waiting.pop()
        for earlier in [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]:
            if earlier.graph is graph and earlier.name not in needed:
                needed.add(earlier.name)
                waiting.append(earlier)
    for operation in graph.get_operations():
        if operation.name not in needed:
            continue
        yield operation
        for name in called_functions(operation):
            inner = None if name in seen else graph_of_call(graph, name)
            if inner is not None:
                seen.add(name)
                yield from _operations_run(inner, seen)


def graph_of_call(graph: Any, name: str) -> Any:
    """The graph of the function `name`, as it was traced or made anew; None if it is not known."""
    return graph_of_function(graph, name) or graph_of_definition(graph, name)


def graph_of_function(graph: Any, name: str) -> Any:
    """The graph of the function `name` that operations of `graph` call; None if it is not known.

    None too if the graph has changed since: where a gradient of the function was taken, TensorFlow has added
    what the gradient needs to the graph's results.
    """
    function = tensorflow_names.GET_FUNCTION.resolve()(graph, name)
    body = getattr(function, "graph", None)
    if body is None or len(body.outputs) != len(function.cached_definition.signature.output_arg):
        return None
    return body


def graph_of_definition(graph: Any, name: str) -> Any:
    """As `graph_of_function`, for a function that has a definition only; None if it is not known.

    That are functions of a saved model that was loaded, those of TensorFlow's operations that are older than
    `tf.function`, such as the loop of the CTC loss, and those whose graph has changed. The graph is made
    anew.
    """
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

    library = graph.as_graph_def().library.function
    definition = next((function_def for function_def in library if function_def.signature.name == name), None)
    if definition is None:
        return None
    with graph.as_default():
        made = function_def_to_graph(definition, include_library_functions=True)
    made.outer_graph = graph
    return made


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
        result = python_function(*args, **kwds)
    return tf.nest.map_structure(_result, result)


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


@contextlib.contextmanager
def without_strategy(model: Any) -> Iterator[None]:
    """A context in which Keras takes a model for one that was made outside of any strategy's scope."""
    strategy, model._distribute_strategy = model._distribute_strategy, None
    try:
        yield
    finally:
        model._distribute_strategy = strategy


def compiled_by_xla(function: Any) -> bool:
    """Whether a `tf.function` was made with `jit_compile=True`."""
    return bool(getattr(function, "_jit_compile", False))


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
    meta.collection_def["train_op"].node_list.value.extend(op.name for op in wanted)
    config = v1.ConfigProto()
    # Without a description of the machine, the optimizer assumes too little memory, and trades time for it.
    config.graph_options.rewrite_options.memory_optimization = 1  # NO_MEM_OPT
    graph_def = tensorflow_names.OPTIMIZE_GRAPH.resolve()(config, meta, verbose=False)
    made = tf.Graph()
    with made.as_default():
        tf.import_graph_def(graph_def, name="")
    return made
