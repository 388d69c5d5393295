"""Rules for the arithmetic of shapes: which entry of a vector of sizes counts rows stays known.

A size that is used as a shape stays each replica's own. One that is used in other arithmetic is made whole,
without communication, since all replicas know how many rows each of them has.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dtrain.partition.layouts import REPLICATED, Entry, RowCount
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.rules.slices import alike
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value, layout_of_sizes, product


def entries_of_shape(value: Value) -> tuple[Entry, ...]:
    """What is known of the shape of a part."""
    entries: list[Entry] = list(value.sizes)
    if value.sharded:
        entries[value.sharded.dim] = value.sharded.rows
    return tuple(entries)


@rule("Shape", "ShapeN", for_replicated=True, for_weights=True)
def _shape(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    if any(value.of_weight for value in inputs):
        return [
            _whole_shape(step, value, tensor.dtype) for value, tensor in zip(inputs, op.outputs, strict=True)
        ]
    if any(value.shape is None for value in inputs):
        return None if any(value.sharded for value in inputs) else step.each(op, inputs, layout_of_sizes(()))
    entries = [entries_of_shape(value) for value in inputs]
    outputs = step.each(op, inputs, [layout_of_sizes(shape) for shape in entries], entries=entries)
    for value, shape in zip(outputs, entries, strict=True):
        if all(isinstance(entry, int) for entry in shape):
            value.constant = np.array(shape, value.dtype.as_numpy_dtype)
    return outputs


def _whole_shape(step: Partitioner, value: Value, dtype: tf.DType) -> Value:
    """The shape of one of several values, of which one is a divided weight."""
    if value.of_weight:
        return step.constant(np.array(value.sizes), dtype)
    entries = None if value.shape is None else entries_of_shape(value)
    shape = step.by_part(
        lambda place: step.build.shape(value.parts[place], dtype),
        layout_of_sizes(entries or ()),
        (value.rank,),
    )
    shape.entries = entries
    return shape


@rule("Size", for_weights=True)
def _size(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    if value.partial:
        return step.each(op, inputs, layout_of_sizes(()))
    if (not value.sharded or value.of_weight) and (number := product(value.shape)) is not None:
        return [step.constant(np.array(number), op.outputs[0].dtype)]
    return _product(step, op, inputs, entries_of_shape(value)) if value.sharded and value.shape else None


@rule("Prod")
def prod(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """The product of the entries of a shape; other products are reductions."""
    value, axes = inputs
    if value.counts_rows and value.entries and axes.constant is not None and op.outputs[0].shape == ():
        return _product(step, op, inputs, value.entries)
    return None


def _product(
    step: Partitioner, op: TracedOperation, inputs: list[Value], entries: tuple[Entry, ...]
) -> list[Value] | None:
    rows = [entry for entry in entries if isinstance(entry, RowCount)]
    others = [entry for entry in entries if not isinstance(entry, RowCount)]
    if len(rows) != 1 or None in others:
        return None
    number = int(np.prod([entry for entry in others if isinstance(entry, int)], dtype=np.int64))
    return step.sizes(op, inputs, [rows[0].times(number)])


@rule("Pack", for_replicated=True)
def pack(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Packs sizes into a shape; other values are divided or partial alike."""
    if all(value.rank == 0 and value.dtype.is_integer for value in inputs):
        inputs = [step.own_sizes(value) for value in inputs]
        return step.sizes(op, inputs, [value.entries[0] if value.entries else None for value in inputs])
    if inputs[0].rank is None:
        return None
    entries = [value.entries or () for value in inputs]
    if any(value.counts_rows for value in inputs) and op.attribute("axis") == 0 and all(entries):
        # Shapes below each other, as in the gradient of a tiled value.
        return step.sizes(op, inputs, [entry for shape in entries for entry in shape])
    axis = op.attribute("axis") % (inputs[0].rank + 1)
    return alike(step, op, inputs, (), lambda dim: dim + (dim >= axis))


@rule("Unpack", for_replicated=True)
def _unpack(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    if value.entries is not None and value.rank == 1:
        entries = [(entry,) for entry in value.entries]
        return step.each(op, inputs, [layout_of_sizes(shape) for shape in entries], entries=entries)
    if value.partial or value.replicated:
        return step.each(op, inputs, value.layout)
    if value.sharded is None or value.rank is None:
        return None
    axis, dim = op.attribute("axis") % value.rank, value.sharded.dim
    return None if axis == dim else step.each(op, inputs, value.sharded.along(dim - (dim > axis)))


@rule("DynamicStitch", for_replicated=True)
def _stitch(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    half = len(inputs) // 2
    entries: dict[int, Entry] = {}
    for places, value in zip(inputs[:half], inputs[half:], strict=True):
        if places.constant is None or value.entries is None:
            return None
        entries.update(zip(map(int, places.constant.reshape(-1)), value.entries, strict=True))
    return step.sizes(op, inputs, [entries.get(place) for place in range(max(entries) + 1)])


@rule("BroadcastArgs", for_replicated=True)
def _broadcast_shape(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """The shape of what is broadcast from two shapes."""
    if any(value.entries is None for value in inputs):
        return None
    shapes = [value.entries or () for value in inputs]
    rank = max(map(len, shapes))
    entries: list[Entry] = []
    for left, right in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        if left != right and 1 not in (left, right):
            return None
        entries.append(right if left == 1 else left)
    return step.sizes(op, [step.own_sizes(value) for value in inputs], entries)


@rule("BroadcastGradientArgs", for_replicated=True)
def _broadcast_gradient(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Which dimensions a gradient is summed over. They do not depend on a replica's rows."""
    shapes = [value.entries for value in inputs]
    if shapes[0] is None or shapes[1] is None:
        return None
    rank = max(len(shape) for shape in shapes if shape is not None)
    left, right = ((1,) * (rank - len(shape)) + shape for shape in shapes if shape is not None)
    summed: list[set[int]] = [set(), set()]
    kept: list[set[int]] = [set(), set()]
    for dim, pair in enumerate(zip(left, right, strict=True)):
        rows = [entry for entry in pair if isinstance(entry, RowCount)]
        if rows and (None in pair or (len(set(pair)) > 1 and 1 not in pair)):
            return None
        for own, other, surely, never in zip(pair, pair[::-1], summed, kept, strict=True):
            if own == 1:
                surely.add(dim)
            elif own is not None or (rows and own == other):
                never.add(dim)
    if all(len(a) + len(b) == rank for a, b in zip(summed, kept, strict=True)):
        return [
            step.constant(np.array(sorted(dims), np.int64), tensor.dtype)
            for dims, tensor in zip(summed, op.outputs, strict=True)
        ]
    # Of the whole: a single row of a replica would look like a dimension that is broadcast.
    outputs = step.each(op, [step.whole(value) for value in inputs], REPLICATED)
    for value, surely, never in zip(outputs, summed, kept, strict=True):
        value.summed, value.kept = frozenset(surely), frozenset(never)
    return outputs


@rule("ConcatOffset", for_replicated=True)
def _concat_offset(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Where the inputs of a concatenation begin in it, the same for all replicas if another axis is divided.

    It is not computed from the inputs' sizes, of which some may be a replica's, others the whole's.
    """
    axis, shapes = inputs[0].scalar_constant, [value.entries for value in inputs[1:]]
    known = [shape for shape in shapes if shape is not None]
    if axis is None or len(known) < len(shapes) or any(isinstance(shape[axis], RowCount) for shape in known):
        return None
    offsets, begin = [], 0
    for shape in known:
        entries: list[Entry] = [0] * len(shape)
        entries[axis] = begin
        offsets.append(step.constant(np.array(entries), op.outputs[0].dtype))
        size = shape[axis]
        if not isinstance(size, int):
            return None
        begin += size
    return offsets
