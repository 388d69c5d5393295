"""Finds static shapes that the trace has lost: in loops, those of what comes out of lists."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtrain.partition.traced import TracedOperation, TracedTensor, static_shape
from dtrain.partition.values import Value

_WITHOUT = (tf.variant, tf.resource)


def infer_shapes(op: TracedOperation, inputs: Sequence[Value], *, nested: bool) -> None:
    """Sets the static shapes of outputs that were traced without, from those of the whole inputs.

    Args:
        op: the operation.
        inputs: its inputs.
        nested: whether it is in a function that was traced without the shapes of variables and lists.
    """
    lost = [tensor for tensor in op.outputs if tensor.dtype not in _WITHOUT and _lost(tensor, nested=nested)]
    if not lost or not inputs or any(value.dtype in _WITHOUT for value in inputs):
        return
    if op.control_flow or not hasattr(tf.raw_ops, op.type):  # it calls functions, or is one
        return
    graph_def = tf.compat.v1.GraphDef()
    node = graph_def.node.add(name="inferred", op=op.type)
    for name, value in op.attributes.items():
        node.attr[name].CopyFrom(value)
    node.input.extend(f"x{place}:0" for place in range(len(inputs)))
    with tf.Graph().as_default() as graph:
        given = {
            f"x{place}:0": tf.compat.v1.placeholder(value.dtype, value.shape)
            if value.constant is None
            else tf.constant(value.constant, value.dtype)
            for place, value in enumerate(inputs)
        }
        tf.graph_util.import_graph_def(graph_def, input_map=given, name="")
        outputs = graph.get_operation_by_name("inferred").outputs
    for tensor in lost:
        tensor.shape = static_shape(outputs[tensor.index].shape)


def _lost(tensor: TracedTensor, *, nested: bool) -> bool:
    if tensor.traced_shape is None:
        return True
    return nested and tensor.traced_shape.count(None) > 1
