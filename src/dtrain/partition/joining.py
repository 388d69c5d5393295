"""Finds the layout in which values of several layouts, of branches, loops and lists, can be given."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtrain.partition.layouts import LOCAL_SIZES, PARTIAL, REPLICATED, Layout, ListOf, Sharded
from dtrain.partition.traced import Shape
from dtrain.partition.values import Value


def joined(values: Sequence[tuple[Layout, Shape]]) -> Layout:
    """The layout in which any of these values can be given with the least communication.

    Args:
        values: their layouts and static shapes.
    """
    first, *others = values
    found, shape = first
    for layout, other in others:
        found, shape = _joined(found, shape, layout, other), common_shape([shape, other])
    return found


def _joined(left: Layout, left_shape: Shape, right: Layout, right_shape: Shape) -> Layout:
    if left == right:
        return REPLICATED if left == LOCAL_SIZES else left
    if isinstance(left, ListOf) and isinstance(right, ListOf):
        return joined_lists(left, right)
    pair = {left, right}
    if pair == {REPLICATED, PARTIAL}:
        return PARTIAL
    divided = [each for each in pair if isinstance(each, Sharded)]
    if len(divided) == 1 and REPLICATED in pair and left_shape is not None and right_shape is not None:
        dim = divided[0].dim
        rows = {shape[dim] if dim < len(shape) else None for shape in (left_shape, right_shape)}
        if len(rows) == 1 and None not in rows:
            return divided[0]
    return REPLICATED  # the whole value may have other rows


def joined_lists(left: ListOf, right: ListOf) -> ListOf:
    """As `joined`, of two lists: by the layouts of their elements."""
    if left.element is None or right.element is None:
        return right if left.element is None else left
    shape = common_shape([left.shape, right.shape])
    if left.element == right.element == LOCAL_SIZES and left.entries == right.entries:
        return ListOf(LOCAL_SIZES, shape, left.entries)
    return ListOf(_joined(left.element, left.shape, right.element, right.shape), shape)


def common_shape(shapes: Sequence[Shape]) -> Shape:
    """What several static shapes agree on."""
    first, *others = shapes
    for each in others:
        if first is None or each is None or len(first) != len(each):
            return None
        first = tuple(a if a == b else None for a, b in zip(first, each, strict=True))
    return first


def element_dtype(value: Value) -> tf.DType:
    """The type of a list's elements, found from the operations around it.

    Raises:
        ValueError: none of them says it.
    """
    seen, waiting = set(), [value.tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor is None or tensor in seen:
            continue
        seen.add(tensor)
        for op in [tensor.op, *tensor.consumers]:
            if "element_dtype" in op.node.attr:
                return op.attribute("element_dtype")
            waiting += [each for each in [*op.inputs, *op.outputs] if each.dtype == tf.variant]
    raise ValueError("the type of a list's elements is not known")
