"""What TensorFlow has no public API for about XLA: the operations that a step runs, and those that XLA has.

It compiles nothing and judges nothing; `diagnosis/tpu_step.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtrain.upstream.tensorflow import graph_of_function

_DEVICE = "XLA_CPU_JIT"


def operations_of_xla() -> frozenset[str]:
    """The types of the operations that XLA for CPUs can compile; empty before it has compiled anything."""
    from tensorflow.python.framework import kernels

    found = kernels.get_all_registered_kernels().kernel
    return frozenset(each.op for each in found if each.device_type == _DEVICE)


def called_functions(operation: Any) -> list[str]:
    """The names of the functions that an operation calls, such as the branches of a condition."""
    names = []
    for each in operation.node_def.attr.values():
        names += [each.func.name] if each.WhichOneof("value") == "func" else []
        names += [function.name for function in each.list.func]
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
        for each in [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]:
            if each.graph is graph and each.name not in needed:
                needed.add(each.name)
                waiting.append(each)
    for operation in graph.get_operations():
        if operation.name not in needed:
            continue
        yield operation
        for name in called_functions(operation):
            inner = graph_of_function(graph, name)
            if inner is not None and name not in seen:
                seen.add(name)
                yield from _operations_run(inner, seen)
