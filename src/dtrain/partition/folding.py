"""Computes operations on small constants while a step is partitioned: axes and shapes follow from them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.partition.traced import TracedOperation

_LARGEST = 64  # elements of a constant that is followed
_FOLDED = frozenset(
    [
        "Add",
        "AddV2",
        "BroadcastArgs",
        "Cast",
        "ConcatV2",
        "DivNoNan",
        "Equal",
        "ExpandDims",
        "Fill",
        "FloorDiv",
        "FloorMod",
        "GatherV2",
        "Greater",
        "GreaterEqual",
        "Identity",
        "Less",
        "LessEqual",
        "ListDiff",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Max",
        "Maximum",
        "Min",
        "Minimum",
        "Mul",
        "Neg",
        "NotEqual",
        "Pack",
        "Prod",
        "Range",
        "Rank",
        "RealDiv",
        "Reshape",
        "Select",
        "SelectV2",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "StridedSlice",
        "Sub",
        "Sum",
        "Transpose",
        "Unpack",
        "BroadcastGradientArgs",
        "ConcatOffset",
        "Split",
        "DynamicStitch",
        "InvertPermutation",
        "ZerosLike",
        "OnesLike",
        "Tile",
    ]
)


def folded(op: TracedOperation, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """The outputs of an operation whose inputs are small constants; None if they are not computed here.

    Args:
        op: the operation.
        inputs: the values of its inputs; None for those that are not known.
    """
    if op.type not in _FOLDED or not inputs or not op.outputs:
        return None
    constants = [array for array in inputs if array is not None and array.size <= _LARGEST]
    if len(constants) < len(inputs) or any(not _small(tensor.shape) for tensor in op.outputs):
        return None
    with tf.init_scope(), tf.device("/cpu:0"):
        tensors = [
            tf.constant(array, tensor.dtype) for array, tensor in zip(constants, op.inputs, strict=True)
        ]
        outputs = _run(op, tensors)
    return [output.numpy() for output in outputs]


def _small(shape: tuple[int | None, ...] | None) -> bool:
    return shape is None or int(np.prod([size or 0 for size in shape], dtype=np.int64)) <= _LARGEST


def _run(op: TracedOperation, tensors: list[Any]) -> list[Any]:
    """Runs one operation eagerly.

    `tf.raw_ops` renames some arguments, such as `reduction_indices`. So they are passed by their order: first
    the inputs, then the attributes without a default, then the others.
    """
    definition, given, inferred = op.definition, [], set()
    for argument in definition.input_arg:
        inferred |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
        count = op.attribute(argument.number_attr) if argument.number_attr else 1
        given.append(tensors[:count] if argument.number_attr else tensors[0])
        tensors = tensors[count:]
    attributes = [attribute for attribute in definition.attr if attribute.name not in inferred]
    attributes.sort(key=lambda attribute: attribute.HasField("default_value"))
    given += [op.attribute(attribute.name) for attribute in attributes]
    function = getattr(tf.raw_ops, op.type)
    names = [name for name in inspect.signature(function).parameters if name != "name"]
    result = function(**dict(zip(names, given, strict=True)))
    return list(result) if isinstance(result, (list, tuple)) else [result]
