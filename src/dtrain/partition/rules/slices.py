"""Rules for operations that cut and join tensors: slice, concatenate, split, pad, gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dtrain.partition.layouts import PARTIAL, REPLICATED, Entry
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value, layout_of_sizes, rows_in_shape


def alike(
    step: Partitioner,
    op: TracedOperation,
    values: list[Value],
    rest: Sequence[Value],
    move: Callable[[int], int] = lambda dim: dim,
) -> list[Value] | None:
    """An operation on several values of equal rank, which it needs divided alike, or all partial.

    Args:
        step: the partitioner.
        op: the operation.
        values: the values.
        rest: its other inputs, which follow.
        move: the divided dimension of the result, by that of the values.
    """
    if all(value.partial for value in values):
        return step.each(op, [*values, *rest], PARTIAL)
    lead = next((value.sharded for value in values if value.sharded), None)
    if lead is None or any(value.rank is None for value in values):
        return None
    operands = [step.divided(value, lead) for value in values]
    if any(value.layout != lead for value in operands):
        return None  # of one entry along the divided dimension
    return step.each(op, [*operands, *rest], lead.along(move(lead.dim)))


@rule("StridedSlice", for_replicated=True)
def _strided_slice(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, begin, end, stride = inputs
    constants = [bound.constant for bound in (begin, end, stride)]
    if value.entries is not None and value.rank == 1 and not op.attribute("new_axis_mask"):
        if any(bound is None or bound.size != 1 for bound in constants):  # "..." beside an index, perhaps
            return None
        entries = _entries_sliced(
            op, value.entries, [int(bound[0]) for bound in constants if bound is not None]
        )
        return step.sizes(op, inputs, entries)
    if value.counts_rows:
        return None
    inputs = [value, *map(step.whole, inputs[1:])]
    if not value.sharded:
        return step.each(op, inputs, value.layout)
    if value.shape is None:
        return None
    to_end = [entry == value.sharded.rows for entry in end.entries or ()]  # of the divided dimension
    to = _through(_slice_of_dims(op, value.shape, constants, to_end), value.sharded.dim)
    return None if to is None else step.each(op, inputs, value.sharded.along(to))


def _entries_sliced(op: TracedOperation, entries: tuple[Entry, ...], bounds: list[int]) -> tuple[Entry, ...]:
    begin, end, stride = bounds
    if op.attribute("shrink_axis_mask"):
        return (entries[begin],)
    if op.attribute("ellipsis_mask"):
        return entries
    first = None if op.attribute("begin_mask") else begin
    return entries[slice(first, None if op.attribute("end_mask") else end, stride)]


_KEPT, _CUT, _DROPPED, _NEW = "kept", "cut", "dropped", "new"


def _slice_of_dims(
    op: TracedOperation,
    shape: tuple[int | None, ...],
    bounds: list[np.ndarray | None],
    to_end: Sequence[bool] = (),
) -> list[str]:
    """What a strided slice does with each dimension of its input.

    Args:
        op: the slice.
        shape: the shape of its input.
        bounds: begin, end and stride, where they are known.
        to_end: of ends that are not known, those that are the size of the dimension.
    """
    masks = {
        name: op.attribute(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    count = op.inputs[1].shape[0] if op.inputs[1].shape else None
    if count is None:
        return [_CUT] * len(shape)

    def has(name: str, place: int) -> bool:
        return bool(masks[name] >> place & 1)

    used = sum(not has("ellipsis", place) and not has("new_axis", place) for place in range(count))
    begin, end, stride = bounds
    slices: list[str] = []
    dim = 0
    for place in range(count):
        if has("ellipsis", place):
            slices += [_KEPT] * (len(shape) - used)
            dim += len(shape) - used
        elif has("new_axis", place):
            slices.append(_NEW)
        elif has("shrink_axis", place):
            slices.append(_DROPPED)
            dim += 1
        else:
            size = shape[dim]
            from_first = has("begin", place) or (begin is not None and begin[place] == 0)
            to_last = has("end", place) or (end is not None and size is not None and end[place] >= size)
            to_last |= place < len(to_end) and to_end[place]
            every = stride is not None and stride[place] == 1
            slices.append(_KEPT if from_first and to_last and every else _CUT)
            dim += 1
    return slices + [_KEPT] * (len(shape) - dim)


def _through(slices: list[str], dim: int) -> int | None:
    """Where a dimension of the input is in the result; None if it is cut or dropped."""
    at = to = 0
    for kind in slices:
        if kind == _NEW:
            to += 1
            continue
        if at == dim:
            return to if kind == _KEPT else None
        at += 1
        to += kind != _DROPPED
    return None


@rule("StridedSliceGrad")
def _strided_slice_gradient(
    step: Partitioner, op: TracedOperation, inputs: list[Value]
) -> list[Value] | None:
    shape, gradient = inputs[0], inputs[4]
    if gradient.partial and shape.replicated:
        return step.each(op, [shape, *map(step.whole, inputs[1:4]), gradient], PARTIAL)
    if gradient.sharded is None:
        return None
    counted, known = rows_in_shape(shape), shape.constant is not None
    if shape.entries is None or not (known or (counted and counted[1] == gradient.sharded.rows)):
        return None
    sizes = tuple(size if isinstance(size, int) else None for size in shape.entries)
    to_end = [counted is not None and entry == counted[1] for entry in inputs[2].entries or ()]
    slices = _slice_of_dims(op, sizes, [bound.constant for bound in inputs[1:4]], to_end)
    place = next((dim for dim in range(len(sizes)) if _through(slices, dim) == gradient.sharded.dim), None)
    if place is None or (counted is not None and place != counted[0]):
        return None
    layout = gradient.sharded.along(place)
    if known:
        shape = step.own_shape(sizes, layout, shape.dtype)
    (output,) = step.each(op, [shape, *map(step.whole, inputs[1:4]), gradient], layout)
    output.shape = output.shape or sizes
    return [output]


@rule("Slice", for_replicated=True)
def _slice(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, begin, size = inputs
    if (
        value.entries is not None
        and value.rank == 1
        and begin.constant is not None
        and size.constant is not None
    ):
        first, number = int(begin.constant[0]), int(size.constant[0])
        return step.sizes(op, inputs, value.entries[first : None if number < 0 else first + number])
    if value.counts_rows:
        return None
    if value.sharded is None:
        return step.each(op, [value, step.whole(begin), step.whole(size)], value.layout)
    dim, entries = value.sharded.dim, size.entries
    if not begin.replicated or begin.entries is None or begin.entries[dim] != 0 or entries is None:
        return None
    if size.constant is not None and value.shape is not None and size.constant[dim] == value.shape[dim]:
        size = step.open_along(size, dim)
    elif entries[dim] != value.sharded.rows and entries[dim] != -1:
        return None
    return step.each(op, [value, begin, size], value.layout)


@rule("ConcatV2", for_replicated=True)
def _concat(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    *values, axis = inputs
    if all(value.entries is not None and value.rank == 1 for value in values):
        return step.sizes(op, inputs, [entry for value in values for entry in value.entries or ()])
    values = [step.whole_sizes(value) for value in values]
    if all(value.replicated for value in values):
        return step.each(op, [*values, step.whole(axis)], REPLICATED)
    if axis.scalar_constant is None or values[0].rank is None:
        return None
    place = axis.scalar_constant % values[0].rank
    if any(value.sharded and value.sharded.dim == place for value in values):
        return None
    return alike(step, op, values, [axis])


@rule("Split", "SplitV")
def _split(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, axis = (inputs[1], inputs[0]) if op.type == "Split" else (inputs[0], inputs[2])
    if not all(other.replicated for other in inputs if other is not value):
        return None
    if value.partial:
        return step.each(op, inputs, PARTIAL)
    if value.counts_rows and value.entries and value.rank == 1:
        return _sizes_split(step, op, inputs, value.entries)
    if value.sharded is None or axis.scalar_constant is None or value.rank is None:
        return None
    return (
        step.each(op, inputs, value.layout)
        if axis.scalar_constant % value.rank != value.sharded.dim
        else None
    )


def _sizes_split(
    step: Partitioner, op: TracedOperation, inputs: list[Value], entries: tuple[Entry, ...]
) -> list[Value] | None:
    """The parts of a shape."""
    sizes = [len(entries) // len(op.outputs)] * len(op.outputs)
    if op.type == "SplitV":
        if inputs[1].constant is None or (inputs[1].constant < 0).any():
            return None
        sizes = [int(size) for size in inputs[1].constant]
    ends = np.cumsum(sizes)
    parts = [entries[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return step.each(op, inputs, [layout_of_sizes(part) for part in parts], entries=parts)


@rule("Pad", "PadV2", "MirrorPad")
def _pad(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, by = inputs[:2]
    if value.partial and op.type != "PadV2" and by.replicated:
        return step.each(op, inputs, PARTIAL)
    if value.sharded is None or by.constant is None or by.constant[value.sharded.dim].any():
        return None
    return step.each(op, [value, *map(step.whole, inputs[1:])], value.layout)


@rule("GatherV2", for_replicated=True)
def _gather(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, indices, axis_value = inputs
    axis = axis_value.scalar_constant
    if value.entries is not None and value.rank == 1 and indices.constant is not None:
        return step.sizes(op, inputs, [value.entries[int(index)] for index in indices.constant.reshape(-1)])
    if all(operand.replicated for operand in inputs):
        return step.each(op, inputs, REPLICATED)
    if axis is None or value.counts_rows or indices.counts_rows or value.rank is None or indices.rank is None:
        return None
    axis %= value.rank
    batch_dims = op.attribute("batch_dims")
    if value.of_weight:
        if not axis and not batch_dims and (indices.sharded or indices.replicated):
            return [step.rows_of_weight(value, indices)]
        value = step.whole(value)
        inputs = [value, indices, axis_value]
    if batch_dims:
        lead = next(
            (
                operand.sharded
                for operand in (value, indices)
                if operand.sharded and operand.sharded.dim < batch_dims
            ),
            None,
        )
        if lead is None:
            return None
        operands = [step.divided(operand, lead) for operand in (value, indices)]
        return (
            step.each(op, [*operands, axis_value], lead)
            if all(operand.layout == lead for operand in operands)
            else None
        )
    if value.partial and indices.replicated:
        return step.each(op, inputs, PARTIAL)
    if value.sharded and value.sharded.dim != axis and not indices.sharded:
        moved = value.sharded.dim + (indices.rank - 1 if value.sharded.dim > axis else 0)
        return step.each(op, [value, step.whole(indices), axis_value], value.sharded.along(moved))
    if indices.sharded:
        return step.each(
            op, [step.whole(value), indices, axis_value], indices.sharded.along(axis + indices.sharded.dim)
        )
    return None


@rule("GatherNd")
def _gather_nd(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, indices = inputs
    if indices.sharded is None or indices.rank is None or indices.sharded.dim == indices.rank - 1:
        return None
    return step.each(op, [step.whole(value), indices], indices.layout)
