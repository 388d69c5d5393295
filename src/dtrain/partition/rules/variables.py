"""Rules for variables: each replica has a copy, and all copies are assigned the same whole values."""

from __future__ import annotations

from dtrain.partition.layouts import REPLICATED
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value


@rule("ReadVariableOp", for_replicated=True)
def _read(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (found,) = step.each(op, inputs, REPLICATED)
    if found.shape is None:  # in the body of a loop
        found.shape = op.outputs[0].shape = inputs[0].variable_shape
    return [found]


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def _assign(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, value = inputs
    return step.each(op, [handle, step.whole(value)], REPLICATED)


@rule("ResourceGather")
def _gather(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, indices = inputs
    indices = indices if indices.sharded else step.whole(indices)
    if op.attribute("batch_dims"):
        return None
    (found,) = step.each(op, [handle, indices], indices.layout)
    if found.shape is None and handle.variable_shape is not None and indices.shape is not None:
        found.shape = op.outputs[0].shape = indices.shape + handle.variable_shape[1:]
    return [found]
