"""Rules for lists of tensors, which loops and their gradients keep: a list's elements have one layout."""

from __future__ import annotations

from dtrain.partition.joining import joined, joined_lists
from dtrain.partition.layouts import LOCAL_SIZES, REPLICATED, Layout, ListOf, Sharded
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import Shape, TracedOperation
from dtrain.partition.values import Value


def lists_alike(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """An operation on lists that are elements alike, such as their sum."""
    layout = joined([(_list(value), value.shape) for value in inputs])
    return step.each(op, [step.with_layout(value, layout) for value in inputs], layout)


def _list(value: Value) -> ListOf:
    return value.listed or ListOf(REPLICATED)


def _put(step: Partitioner, handle: Value, item: Value) -> tuple[Value, Value, ListOf]:
    """The list and the item, laid out for each other."""
    own = ListOf(item.layout, item.shape, item.entries if item.counts_rows else None)
    together = joined_lists(_list(handle), own)
    if together.element is not None and together.element != LOCAL_SIZES:
        item = step.with_layout(item, together.element)
        if item.layout != together.element:  # of one entry along the divided dimension
            together = ListOf(REPLICATED, together.shape)
            item = step.whole(item)
    return step.with_layout(handle, together), item, together


def _taken(value: Value, handle: Value, *, stacked: bool = False) -> Value:
    """An element that comes out of a list, or all of them as one tensor."""
    listed = _list(handle)
    layout: Layout = listed.element or REPLICATED
    if isinstance(layout, Sharded) and stacked:
        layout = layout.along(layout.dim + 1)
    value.layout = layout
    if layout == LOCAL_SIZES:
        value.entries = listed.entries
    if value.shape is None and listed.shape is not None:
        value.shape = (None, *listed.shape) if stacked else listed.shape
    return value


@rule("TensorListReserve", "EmptyTensorList", for_replicated=True)
def _new_list(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    inputs = [step.own_sizes(inputs[0]), step.whole(inputs[1])]
    (handle,) = step.each(op, inputs, ListOf())
    handle.reserved = op, inputs
    return [handle]


@rule("TensorListSetItem", for_replicated=True)
def _set(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, item, layout = _put(step, inputs[0], inputs[2])
    return step.each(op, [handle, step.whole(inputs[1]), item], layout)


@rule("TensorListPushBack", for_replicated=True)
def _push(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, item, layout = _put(step, inputs[0], inputs[1])
    return step.each(op, [handle, item], layout)


@rule("TensorListPopBack", for_replicated=True)
def _pop(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, shape = inputs
    rest, item = step.each(op, [handle, _own_shape(step, handle, shape)], [_list(handle), REPLICATED])
    return [rest, _taken(item, handle)]


@rule("TensorListGetItem", for_replicated=True)
def _get(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, index, shape = inputs
    (item,) = step.each(op, [handle, step.whole(index), _own_shape(step, handle, shape)], REPLICATED)
    return [_taken(item, handle)]


@rule("TensorListStack", for_replicated=True)
def _stack(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, shape = inputs
    if _list(handle).element == LOCAL_SIZES:
        handle = step.with_layout(handle, ListOf(REPLICATED, _list(handle).shape))
    (output,) = step.each(op, [handle, _own_shape(step, handle, shape)], REPLICATED)
    return [_taken(output, handle, stacked=True)]


@rule("TensorListGather", for_replicated=True)
def _gather(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    handle, indices, shape = inputs
    (output,) = step.each(op, [handle, step.whole(indices), _own_shape(step, handle, shape)], REPLICATED)
    return [_taken(output, handle, stacked=True)]


def _own_shape(step: Partitioner, handle: Value, shape: Value) -> Value:
    """The shape of a replica's part of an element; a shape that was traced is one of whole elements."""
    layout = _list(handle).element
    if not isinstance(layout, Sharded) or shape.counts_rows:
        return step.own_sizes(shape)
    if shape.constant is None or shape.constant.ndim == 0:
        return step.whole(shape)
    return step.open_along(shape, layout.dim)


@rule("TensorListFromTensor", for_replicated=True)
def _from_tensor(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, shape = inputs
    element: Shape = None if value.shape is None else value.shape[1:]
    if value.sharded and value.sharded.dim > 0:
        layout = ListOf(value.sharded.along(value.sharded.dim - 1), element)
        probe = Value(value.parts, layout, ())
        return step.each(op, [value, _own_shape(step, probe, shape)], layout)
    if value.partial:
        return step.each(op, [value, step.own_sizes(shape)], ListOf(value.layout, element))
    return step.each(op, [step.whole(value), step.whole(shape)], ListOf(REPLICATED, element))


@rule("TensorListLength", for_replicated=True)
def _length(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return step.each(op, inputs, REPLICATED)


@rule("TensorListElementShape", for_replicated=True)
def _element_shape(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Each replica's own: it is read only to make lists of the same elements."""
    listed = _list(inputs[0])
    layout: Layout = LOCAL_SIZES if isinstance(listed.element, Sharded) else REPLICATED
    entries = None
    if isinstance(listed.element, Sharded) and listed.shape is not None:
        sizes = list(listed.shape)
        entries = tuple(
            listed.element.rows if place == listed.element.dim else size for place, size in enumerate(sizes)
        )
    return step.each(op, inputs, layout, entries=[entries])
