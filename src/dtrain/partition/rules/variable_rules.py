"""Rules for variables.

Each replica has a copy of the whole value; or a part, and the sum is the value; or some entries of one
dimension of a variable that is divided.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dtrain.partition.layouts import PARTIAL, REPLICATED, Sharded
from dtrain.partition.nodes import Ref, attribute
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value


@rule("ReadVariableOp", for_replicated=True)
def _read(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (handle,) = inputs
    if handle.read:
        return [handle.read]
    (output,) = step.each(op, inputs, handle.held or (PARTIAL if handle.in_parts else REPLICATED))
    if output.shape is None:  # in the body of a loop
        output.shape = op.outputs[0].shape = handle.variable_shape
    return [output]


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", for_weights=True)
def _assign(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """All copies are assigned the same; of a variable in parts, or divided, each replica assigns its own."""
    handle, value = inputs
    value = step.with_layout(value, handle.held or (PARTIAL if handle.in_parts else REPLICATED))
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
    """All replicas scatter the same; into a variable in parts, all but the first replica scatter zeros.

    Into a divided variable, each replica scatters the rows that it holds.
    """
    handle, indices, updates = (step.whole(value) for value in inputs)
    if handle.held:
        return _scatter_own(step, op, handle, handle.held, indices, updates)
    if handle.in_parts:
        updates = step.as_partial(updates)
    return step.each(op, [handle, indices, updates], REPLICATED)


@rule(
    "ResourceScatterDiv",
    "ResourceScatterMax",
    "ResourceScatterMin",
    "ResourceScatterMul",
    "ResourceScatterNdMax",
    "ResourceScatterNdMin",
)
def _scatter_otherwise(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """As `_scatter`; no sum of parts follows these."""
    handle, indices, updates = (step.whole(value) for value in inputs)
    return _scatter_own(step, op, handle, handle.held, indices, updates) if handle.held else None


def _scatter_own(
    step: Partitioner, op: TracedOperation, handle: Value, held: Sharded, indices: Value, updates: Value
) -> list[Value]:
    """Scatters what a replica holds, counted from its first entry.

    Indices name the first dimensions. If the variable is divided along one of those, a replica selects the
    indices that name what it holds; else each index names some of it.
    """
    by_index = not op.type.startswith("ResourceScatterNd")
    named = 1 if by_index else indices.sizes[-1] if indices.sizes else None
    if named is None or updates.shape is None:
        raise ValueError("it changes entries of a divided variable, and their shapes are not known")
    build, group = step.build, step.group(held.rows)
    flat = build.reshape(indices.parts[0], (-1, named))
    tail = updates.sizes[len(indices.sizes) - (not by_index) :]
    values = build.reshape(updates.parts[0], (-1, *tail))

    def own(place: int) -> tuple[Ref, Ref]:
        if held.dim >= named:
            begin, size = group.begin[place], group.local[place]
            return flat, build.slice(values, 1 + len(tail), 1 + held.dim - named, begin, size)
        _, here = step.from_first(build.column(flat, held.dim), held, place)
        places = build.reshape(build.op("Where", [here], tf.int64, T=tf.bool), (-1,))
        first, zero = build.cast(group.begin[place], flat.dtype), build.constant(0, flat.dtype)
        offset = build.stack([first if dim == held.dim else zero for dim in range(named)])
        moved = build.binary("Sub", flat, offset)
        return build.rows_at(moved, places), build.rows_at(values, places)

    for place in range(step.replicas.here):
        own_indices, own_updates = own(place)
        own_indices = build.reshape(own_indices, (-1,)) if by_index else own_indices
        given = [handle.parts[place], own_indices, own_updates]
        build.node(op.type, given, op.attributes, [], stateful=True, replica=place)
    return []


@rule("VariableShape", for_replicated=True)
def _shape(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (handle,) = inputs
    if handle.held is None or handle.variable_shape is None:
        return step.each(op, inputs, REPLICATED)
    return [step.constant(np.array(handle.variable_shape), op.outputs[0].dtype)]


@rule("ResourceGather")
def _gather(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, indices = inputs
    if handle.held and not op.attribute("batch_dims"):
        return _gather_of_divided(step, op, handle, handle.held, indices)
    indices = indices if indices.sharded and not handle.in_parts else step.whole(indices)
    if op.attribute("batch_dims"):
        return None
    (output,) = step.each(op, [handle, indices], PARTIAL if handle.in_parts else indices.layout)
    if output.shape is None and handle.variable_shape is not None and indices.shape is not None:
        output.shape = op.outputs[0].shape = indices.shape + handle.variable_shape[1:]
    return [output]


def _gather_of_divided(
    step: Partitioner, op: TracedOperation, handle: Value, held: Sharded, indices: Value
) -> list[Value]:
    """Looks rows of a divided variable up."""
    build, dtype = step.build, op.outputs[0].dtype
    indices = indices if indices.sharded else step.whole(indices)
    read = step.by_part(
        lambda place: build.node(
            "ReadVariableOp", [handle.parts[place]], {"dtype": attribute(dtype)}, [dtype]
        )[0],
        held,
        handle.variable_shape,
    )
    return [step.rows_of_weight(read, indices)]
