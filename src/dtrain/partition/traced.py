"""Reads a traced graph into plain objects, whose attributes cost no call into TensorFlow.

The order is that of the trace, but each operation stands after its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Shape = tuple[int | None, ...] | None
"""A static shape; None if the rank is not known."""


@dataclasses.dataclass(eq=False, slots=True)
class TracedTensor:
    """An output of an operation.

    Attributes:
        op: the operation.
        index: the number of the output.
        dtype: its type.
        shape: its static shape.
        traced_shape: its static shape as it was traced; `shape` may have more by what is known of the inputs.
        consumers: the operations that read it.
    """

    op: TracedOperation
    index: int
    dtype: tf.DType
    shape: Shape
    traced_shape: Shape
    consumers: list[TracedOperation] = dataclasses.field(default_factory=list)

    @property
    def origin(self) -> TracedTensor:
        """The tensor of which this one is a copy; itself if it is none."""
        tensor = self
        while tensor.op.type in ("Identity", "IdentityN"):
            tensor = tensor.op.inputs[tensor.index]
        return tensor


@dataclasses.dataclass(eq=False, slots=True)
class TracedOperation:
    """An operation of a traced graph.

    Attributes:
        name: its name in the graph.
        type: its type, such as "MatMul".
        node: its definition.
        inputs: the tensors that it reads.
        control: the operations that run before it.
        outputs: its results.
        definition: the definition of its type.
        graph: the graph of TensorFlow that it is in.
    """

    name: str
    type: str
    node: Any
    inputs: list[TracedTensor]
    control: list[TracedOperation]
    outputs: list[TracedTensor]
    definition: Any
    graph: Any

    @property
    def stateful(self) -> bool:
        """Whether it has an effect, or depends on one."""
        return self.definition.is_stateful

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of its definition, without the marks of one graph, such as where it is placed."""
        return {name: value for name, value in self.node.attr.items() if not name.startswith("_")}

    @property
    def control_flow(self) -> bool:
        """Whether it calls functions."""
        return bool(self.functions)

    @property
    def functions(self) -> list[str]:
        """The names of the functions that it calls."""
        return [
            function.name
            for attribute in self.node.attr.values()
            for function in ([attribute.func] if attribute.HasField("func") else attribute.list.func)
        ]

    @property
    def frames(self) -> Sequence[Any]:
        """The stack of the Python code that made it, the innermost frame last; empty if it is not known."""
        return self.graph.get_operation_by_name(self.name).traceback or ()

    def attribute(self, name: str) -> Any:
        """The value of an attribute: a number, a text, a type, or a list of these."""
        return _plain(self.node.attr[name])


@dataclasses.dataclass(frozen=True, slots=True)
class TracedGraph:
    """A traced function.

    Attributes:
        operations: what the results and effects need; each stands after its inputs.
        inputs: the function's inputs, captured ones included.
        outputs: its results.
        source: the graph of TensorFlow.
    """

    operations: list[TracedOperation]
    inputs: list[TracedTensor]
    outputs: list[TracedTensor]
    source: Any


def read_graph(graph: Any) -> TracedGraph:
    """Reads the graph of a concrete function.

    Args:
        graph: a `FuncGraph`.
    """
    definitions = {node.name: node for node in graph.as_graph_def().node}
    known: dict[str, TracedOperation] = {}
    for op in _in_order(graph):
        inputs = [known[t.op.name].outputs[t.value_index] for t in op.inputs]
        control = [known[predecessor.name] for predecessor in op.control_inputs]
        made = TracedOperation(op.name, op.type, definitions[op.name], inputs, control, [], op.op_def, graph)
        for index, tensor in enumerate(op.outputs):
            shape = static_shape(tensor.shape)
            made.outputs.append(TracedTensor(made, index, tensor.dtype, shape, shape))
        for tensor in inputs:
            tensor.consumers.append(made)
        known[op.name] = made

    def found(tensors: Iterable[Any]) -> list[TracedTensor]:
        return [known[tensor.op.name].outputs[tensor.value_index] for tensor in tensors]

    return TracedGraph(list(known.values()), found(graph.inputs), found(graph.outputs), graph)


def _in_order(graph: Any) -> list[Any]:
    """The operations that outputs and effects need, each after its inputs, otherwise as they were traced.

    A loop whose gradient is taken gets more inputs after it was made, so the order of creation is not enough.
    """
    operations = graph.get_operations()
    wanted = {tensor.op.name for tensor in [*graph.outputs, *graph.inputs]}
    wanted |= {
        operation.name
        for operation in operations
        if operation.op_def.is_stateful and operation.type != "Placeholder"
    }
    done: set[str] = set()
    order: list[Any] = []
    for root in operations:
        waiting = [(root, False)] if root.name in wanted else []
        while waiting:
            op, complete = waiting.pop()
            if complete:
                order.append(op)
            elif op.name not in done:
                done.add(op.name)
                waiting.append((op, True))
                before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
                waiting += [
                    (operation, False) for operation in reversed(before) if operation.name not in done
                ]
    return order


def static_shape(shape: tf.TensorShape) -> Shape:
    """A static shape as a tuple."""
    return None if shape.rank is None else tuple(shape.as_list())


def constant_of(op: TracedOperation) -> np.ndarray:
    """The value of a `Const`."""
    return tf.make_ndarray(op.node.attr["value"].tensor)


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "list":
        content: Sequence[Any] = next((items for _, items in value.list.ListFields()), [])
        return list(content)
    if kind == "type":
        return tf.dtypes.as_dtype(value.type)
    return getattr(value, kind) if kind else None
