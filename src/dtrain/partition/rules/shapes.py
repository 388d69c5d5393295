"""Rules for operations that give elements another shape: reshape, transpose, broadcast, tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtrain.partition.layouts import PARTIAL, REPLICATED, Entry, RowCount, Sharded
from dtrain.partition.nodes import Ref
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value, product, rows_in_shape


@rule("Reshape", for_replicated=True)
def _reshape(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, target = inputs
    if value.entries is not None and op.outputs[0].shape in ((), (1,), (len(value.entries),)):
        (output,) = step.each(op, [value, step.whole(target)], value.layout, entries=[value.entries])
        output.constant = None if value.constant is None else value.constant.reshape(op.outputs[0].shape)
        return [output]
    if value.counts_rows:
        return None
    counted = rows_in_shape(target)
    if counted is not None and value.sharded:
        (place, rows), entries = counted, target.entries or ()
        if rows.group == value.sharded.rows.group and _same_order(value, entries, place):
            (output,) = step.each(op, inputs, Sharded(place, rows))
            if output.shape is None:
                output.shape = tuple(entry if isinstance(entry, int) else None for entry in entries)
            return [output]
    if not value.sharded:
        return step.each(op, [value, step.whole(target)], value.layout)
    shape = op.outputs[0].shape
    found_dim = None if shape is None else _divided_dim(value, shape)
    if found_dim is None or shape is None:
        return None
    dim, rows = found_dim
    if any(size == 0 for place, size in enumerate(shape) if place != dim):
        return None
    target, build = step.whole(target), step.build

    def part(replica: int) -> Ref:
        group = step.group(rows)
        own = build.cast(build.times(group.local[replica], rows.factor), target.dtype)
        sizes = [
            own
            if place == dim
            else build.constant(size, target.dtype)
            if size is not None
            else build.entry(target.parts[replica], place)
            for place, size in enumerate(shape)
        ]
        return build.op(
            "Reshape", [value.parts[replica], build.stack(sizes)], T=value.dtype, Tshape=target.dtype
        )

    return [step.by_part(part, Sharded(dim, rows), shape)]


def _same_order(value: Value, entries: Sequence[Entry], place: int) -> bool:
    """Whether the divided dimension is as far out after a reshape as before."""
    if value.division.dim == 0 and place == 0:
        return True
    if value.shape is None:
        return False
    before = product(value.shape[: value.division.dim])
    after = product(tuple(entries[:place]))
    return before is not None and before == after


def _divided_dim(value: Value, shape: tuple[int | None, ...]) -> tuple[int, RowCount] | None:
    """Which dimension of the reshaped value is divided, and what its entries count."""
    if value.shape is None:
        return None
    dim, rows = value.division.dim, value.division.rows
    outer, inner = product(value.shape[:dim]), product(value.shape[dim + 1 :])
    size = value.shape[dim]
    if outer is None or inner is None:
        return None
    for place in range(len(shape)):
        rest = product(shape[place + 1 :])
        if product(shape[:place]) != outer or not rest or (rows.factor * inner) % rest:
            continue
        if size is not None and shape[place] is not None and shape[place] != size * inner // rest:
            continue
        if shape[place] == 1 and size != 1:
            continue
        return place, RowCount(rows.group, rows.factor * inner // rest)
    return None


@rule("Transpose")
def _transpose(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, order = inputs
    if value.partial and order.replicated:
        return step.each(op, inputs, PARTIAL)
    if value.counts_rows and value.entries and order.constant is not None and None not in (value.shape or ()):
        places = np.arange(len(value.entries)).reshape(value.sizes).transpose(order.constant)  # type: ignore[arg-type]
        return step.sizes(op, inputs, [value.entries[place] for place in places.reshape(-1)])
    if value.sharded is None or order.constant is None:
        return None
    return step.each(
        op, inputs, value.sharded.along([int(axis) for axis in order.constant].index(value.sharded.dim))
    )


@rule("ExpandDims", for_replicated=True)
def _expand_dims(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, axis = inputs
    if value.rank == 0 and value.entries is not None:
        return step.sizes(op, inputs, value.entries)
    if value.partial or (value.replicated and axis.replicated):
        return step.each(op, [value, step.whole(axis)], value.layout)
    if value.sharded is None or axis.scalar_constant is None or value.rank is None:
        return None
    place = axis.scalar_constant % (value.rank + 1)
    return step.each(op, inputs, value.sharded.along(value.sharded.dim + (value.sharded.dim >= place)))


@rule("Squeeze", for_replicated=True)
def _squeeze(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    if value.entries is not None and value.rank == 1 and len(value.entries) == 1:
        return step.sizes(op, inputs, value.entries)
    if value.partial or value.replicated:
        return step.each(op, inputs, value.layout)
    if value.sharded is None or value.shape is None or op.outputs[0].shape is None:
        return None
    named = [axis % len(value.shape) for axis in op.attribute("squeeze_dims") or []]
    axes = named or [place for place, size in enumerate(value.shape) if size == 1]
    dim = value.sharded.dim
    if dim in axes:
        return None
    # A replica with one row must keep that dimension: name those to remove.
    return step.each(
        op, inputs, value.sharded.along(dim - sum(axis < dim for axis in axes)), squeeze_dims=axes
    )


@rule("EnsureShape")
def _ensure_shape(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    if value.sharded is None or op.outputs[0].shape is None:
        return None
    sizes = list(op.outputs[0].shape)
    sizes[value.sharded.dim] = None
    return step.each(op, inputs, value.layout, shape=tf.TensorShape(sizes))


@rule("BroadcastTo", for_replicated=True)
def _broadcast_to(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, target = inputs
    counted = rows_in_shape(target)
    if counted is None or value.rank is None:
        if value.replicated or value.partial:
            return step.each(op, [value, step.whole(target)], value.layout)
        if value.sharded is None or value.shape is None or target.constant is None:
            return None
        sizes = target.constant.tolist()
        place = value.sharded.dim + len(sizes) - len(value.shape)
        if sizes[place] != value.shape[value.sharded.dim]:
            return None
        layout = value.sharded.along(place)
        return step.each(op, [value, step.own_shape(sizes, layout, target.dtype)], layout)
    place, rows = counted
    value = step.whole(value) if value.partial or value.counts_rows else value
    dim = place - (len(target.entries or ()) - len(value.sizes))
    if dim >= 0:
        value = step.divided(value, Sharded(dim, rows))
    return step.each(op, [value, target], Sharded(place, rows))


@rule("Fill", for_replicated=True)
def _fill(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    target, value = inputs
    counted = rows_in_shape(target)
    if counted is None:
        return step.each(op, [step.whole(operand) for operand in inputs], REPLICATED)
    place, rows = counted
    return step.each(op, [target, step.whole(value)], Sharded(place, rows))


@rule("Tile")
def _tile(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, times = inputs
    if times.counts_rows:
        counted = rows_in_shape(times)
        if counted is None or value.sharded or not value.shape or value.shape[counted[0]] != 1:
            return None
        place, rows = counted
        return step.each(op, [step.whole(value), times], Sharded(place, rows))
    if value.partial and times.replicated:
        return step.each(op, inputs, PARTIAL)
    if value.sharded is None or times.constant is None or times.constant[value.sharded.dim] != 1:
        return None
    return step.each(op, inputs, value.layout)


@rule("Range")
def _range(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """The numbers of the rows: each replica has those of its own."""
    start, limit, delta = inputs
    rows = limit.entries[0] if limit.counts_rows and limit.entries else None
    if not isinstance(rows, RowCount) or start.scalar_constant != 0 or delta.scalar_constant != 1:
        return None
    if not op.outputs[0].dtype.is_integer:
        return None
    build, group = step.build, step.group(rows)

    def part(place: int) -> Ref:
        begin = build.cast(build.times(group.begin[place], rows.factor), limit.dtype)
        end = build.binary("AddV2", begin, limit.parts[place])
        return build.op("Range", [begin, end, delta.parts[place]], Tidx=limit.dtype)

    return [step.by_part(part, Sharded(0, rows), op.outputs[0].shape)]
