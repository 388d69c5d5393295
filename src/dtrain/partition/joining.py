"""Finds the layout in which values of several layouts, of branches, loops and lists, can be given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dtrain.partition.layouts import LOCAL_SIZES, PARTIAL, REPLICATED, Layout, ListOf, Sharded
from dtrain.partition.traced import Shape
from dtrain.partition.values import Value
from dtrain.upstream.graph_functions import graph_of_call


def joined(values: Sequence[tuple[Layout, Shape]]) -> Layout:
    """The layout in which any of these values can be given with the least communication.

    Args:
        values: their layouts and static shapes.
    """
    first, *others = values
    layout, shape = first
    for other_layout, other_shape in others:
        layout, shape = _joined(layout, shape, other_layout, other_shape), common_shape([shape, other_shape])
    return layout


def _joined(left: Layout, left_shape: Shape, right: Layout, right_shape: Shape) -> Layout:
    if left == right:
        return REPLICATED if left == LOCAL_SIZES else left
    if isinstance(left, ListOf) and isinstance(right, ListOf):
        return joined_lists(left, right)
    pair = {left, right}
    if pair == {REPLICATED, PARTIAL}:
        return PARTIAL
    divided = [layout for layout in pair if isinstance(layout, Sharded)]
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
    for shape in others:
        if first is None or shape is None or len(first) != len(shape):
            return None
        first = tuple(a if a == b else None for a, b in zip(first, shape, strict=True))
    return first


_GIVE_ELEMENTS = ("TensorListGetItem", "TensorListGather", "TensorListStack")


def element_dtype(value: Value) -> tf.DType:
    """The type of a list's elements, found from the operations on it, in functions that get it, too.

    Raises:
        ValueError: none of them says it.
    """
    traced = value.tensor
    if traced is None:
        raise ValueError("the type of a list's elements is not known")
    graph = traced.op.graph
    waiting = [graph.get_operation_by_name(traced.op.name).outputs[traced.index]]
    seen: set[tuple[int, str]] = set()
    while waiting:
        tensor = waiting.pop()
        key = id(tensor.graph), tensor.name
        if key in seen:
            continue
        seen.add(key)
        made = [(tensor.op, tensor.value_index, False)]
        read = [
            (op, index, True)
            for op in tensor.consumers()
            for index, operand in enumerate(op.inputs)
            if operand.name == tensor.name
        ]
        for op, index, is_input in made + read:
            if "element_dtype" in op.node_def.attr:
                # At another place it is an element, of a list of lists.
                if index == 0 and (is_input or op.type not in _GIVE_ELEMENTS):
                    return op.get_attr("element_dtype")
            else:
                waiting += _same_list(op, index, is_input=is_input)
    raise ValueError("the type of a list's elements is not known")


def _same_list(op: Any, index: int, *, is_input: bool) -> list[Any]:
    """The tensors with the elements of one that an operation of TensorFlow reads, or makes, at a place."""
    attributes = op.node_def.attr
    names = {key: attribute.func.name for key, attribute in attributes.items() if attribute.HasField("func")}
    branches = (
        [branch.name for branch in attributes["branches"].list.func] if "branches" in attributes else []
    )
    if "body" in names:
        body = graph_of_call(op.graph, names["body"])
        around = [op.inputs[index], op.outputs[index]]
        return around if body is None else [*around, body.inputs[index], body.outputs[index]]
    graphs = [graph_of_call(op.graph, name) for name in [*names.values(), *branches]]
    if graphs:
        place = index - bool(branches or "then_branch" in names)  # the first input chooses the branch
        known = [graph for graph in graphs if graph is not None]
        return [graph.inputs[place] if is_input else graph.outputs[index] for graph in known]
    if op.type in ("Identity", "IdentityN"):
        return [op.inputs[index], op.outputs[index]]
    if op.type in ("AddN", "ZerosLike", "Select", "SelectV2"):
        return [tensor for tensor in [*op.inputs, *op.outputs] if tensor.dtype == tf.variant]
    return []
