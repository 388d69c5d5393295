"""Local regions: functions that each replica computes by itself, as if its rows were the whole batch.

A region is a function that is called. So its gradient is one, too, and their names show both.
What leaves a region for the rest of the step has the rows, or is the mean of the replicas' values, weighted
by their rows. Gradients of what all replicas have are sums over the replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.partition.layouts import LOCAL, PARTIAL, Layout, Sharded
from dtrain.partition.partitioner import Partitioner
from dtrain.partition.traced import TracedGraph, TracedTensor
from dtrain.partition.values import Value

_NAME, _BACKWARD = "dtrain_local_region", "__backward_"


def local_region(function: Callable[..., Any], *tensors: tf.Tensor) -> Any:
    """Calls a function of tensors whose first dimension is the batch, as a local region.

    Outside of a step that is partitioned it is an ordinary call.

    Args:
        function: returns a tensor of the same rows. It writes variables, but has no conditions or loops that
            depend on the rows.
        tensors: the arguments.
    """

    def dtrain_local_region(*given: tf.Tensor) -> Any:
        return function(*given)

    specs = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]
    return tf.function(dtrain_local_region, specs, autograph=False)(*tensors)


def is_local_region(name: str) -> bool:
    """Whether a function is a local region, or the gradient of one."""
    return _NAME in name


def region(step: Partitioner, name: str, graph: TracedGraph, inputs: Sequence[Value]) -> list[Value]:
    """Appends a local region.

    Args:
        step: the partitioner.
        name: the name of the region's function.
        graph: the function.
        inputs: the values of its inputs.
    """
    rows = [value.sharded for value in inputs if value.sharded and value.sharded.dim == 0]
    rows += [value.region for value in inputs if value.region]  # what a gradient gets may be whole
    lead = next(iter(rows), None)
    if lead is None:
        return step.run(graph, [step.whole(value) for value in inputs])
    given = [_own(step, value, tensor, lead) for value, tensor in zip(inputs, graph.inputs, strict=True)]
    with step.alone():
        outputs = step.run(graph, given)
    if _BACKWARD in name:
        return [step.counted(_labelled(value, lead, PARTIAL)) for value in outputs]
    # What is kept for the gradient comes after the only result.
    kept = [dataclasses.replace(value, region=lead) if value.local else value for value in outputs[1:]]
    return [_labelled(outputs[0], lead, LOCAL), *kept]


def _own(step: Partitioner, value: Value, tensor: TracedTensor, lead: Sharded) -> Value:
    """What each replica has of an input."""
    if value.replicated and tensor.shape and tensor.shape[0] is None:
        value = step.divided(value, lead)
    if value.partial:
        value = step.whole(value)
    if value.sharded is None:
        return value
    # How many rows a replica has is not known, even where it is known for the whole batch.
    shape = tuple(None if dim == value.sharded.dim else size for dim, size in enumerate(value.sizes))
    return dataclasses.replace(value, layout=LOCAL, shape=shape)


def _labelled(value: Value, lead: Sharded, otherwise: Layout) -> Value:
    """An output of a region, with the layout that it has outside: its rows', if it has rows."""
    if not value.local:
        return value
    layout = lead if value.sizes and value.sizes[0] is None else otherwise
    return dataclasses.replace(value, layout=layout, whole={})
