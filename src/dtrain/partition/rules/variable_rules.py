"""Rules for variables: each replica has a copy of the whole value, or a part, and the sum is the value."""

from __future__ import annotations

from dtrain.partition.layouts import PARTIAL, REPLICATED
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value


@rule("ReadVariableOp", for_replicated=True)
def _read(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (handle,) = inputs
    (output,) = step.each(op, inputs, PARTIAL if handle.in_parts else REPLICATED)
    if output.shape is None:  # in the body of a loop
        output.shape = op.outputs[0].shape = handle.variable_shape
    return [output]


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def _assign(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """All copies are assigned the same; of a variable in parts, each replica assigns its part."""
    handle, value = inputs
    value = step.as_partial(value) if handle.in_parts else step.whole(value)
    return step.each(op, [handle, value], REPLICATED)


@rule(
    "ResourceScatterAdd",
    "ResourceScatterNdAdd",
    "ResourceScatterNdSub",
    "ResourceScatterNdUpdate",
    "ResourceScatterSub",
    "ResourceScatterUpdate",
)
def _scatter(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """All replicas scatter the same; into a variable in parts, all but the first replica scatter zeros."""
    handle, indices, updates = (step.whole(value) for value in inputs)
    if handle.in_parts:
        updates = step.as_partial(updates)
    return step.each(op, [handle, indices, updates], REPLICATED)


@rule("ResourceGather")
def _gather(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, indices = inputs
    indices = indices if indices.sharded and not handle.in_parts else step.whole(indices)
    if op.attribute("batch_dims"):
        return None
    (output,) = step.each(op, [handle, indices], PARTIAL if handle.in_parts else indices.layout)
    if output.shape is None and handle.variable_shape is not None and indices.shape is not None:
        output.shape = op.outputs[0].shape = indices.shape + handle.variable_shape[1:]
    return [output]
