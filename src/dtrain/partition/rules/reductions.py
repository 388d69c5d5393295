"""Rules for reductions. Over the rows, each replica reduces its own, and the results are combined."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from dtrain.partition.layouts import PARTIAL, REPLICATED
from dtrain.partition.nodes import ALL_GATHER, Ref
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.rules.sizes import prod
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value


def axes_of(axes: Value, rank: int) -> list[int] | None:
    """The dimensions that a constant names; None if it is not known."""
    return None if axes.constant is None else sorted({int(axis) % rank for axis in axes.constant.reshape(-1)})


@rule("Sum", "Mean", "Max", "Min", "All", "Any", "Prod", "EuclideanNorm", for_weights=True)
def _reduction(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, axes_value = inputs
    if value.counts_rows:
        return prod(step, op, inputs) if op.type == "Prod" else None
    if not axes_value.replicated:
        return None
    if value.partial:
        return (
            step.each(op, inputs, PARTIAL)
            if op.type in ("Sum", "Mean") and op.outputs[0].dtype.is_floating
            else None
        )
    if value.sharded is None or value.rank is None:
        return None
    axes, dim = axes_of(axes_value, value.rank), value.sharded.dim
    if axes is None:
        return _along_unknown(step, op, inputs, dim)
    if dim not in axes:
        to = dim if op.attribute("keep_dims") else dim - sum(axis < dim for axis in axes)
        return step.each(op, inputs, value.sharded.along(to))
    if op.type == "Sum":
        return _summed(step, op, inputs)
    if op.type == "Mean":
        return _mean(step, op, value, axes_value, axes) if op.outputs[0].dtype.is_floating else None
    return _combined(step, op, inputs)


def _summed(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value]:
    """Each replica's sum; entries of weights count once, where several replicas hold them."""
    (output,) = step.each(op, inputs, PARTIAL)
    return [step.counted_once(output) if inputs[0].of_weight else output]


def _along_unknown(
    step: Partitioner, op: TracedOperation, inputs: list[Value], dim: int
) -> list[Value] | None:
    """The gradient of broadcasting: a sum whose axes depend on sizes, then a reshape."""
    axes = inputs[1]
    if op.type != "Sum" or {consumer.type for consumer in op.outputs[0].consumers} != {"Reshape"}:
        return None
    if dim in axes.summed:
        return step.each(op, inputs, PARTIAL)
    if dim not in axes.kept:
        return None
    (output,) = step.each(op, inputs, inputs[0].layout, keep_dims=True)
    output.shape = None if inputs[0].shape is None else (None,) * len(inputs[0].shape)
    return [output]


def _mean(
    step: Partitioner, op: TracedOperation, value: Value, axes_value: Value, axes: list[int]
) -> list[Value]:
    """Each replica's sum, divided by the number of entries of all."""
    build, rows = step.build, value.division.rows
    group = step.group(rows)
    others = [axis for axis in axes if axis != value.division.dim]
    keep = op.attribute("keep_dims")

    def part(place: int) -> Ref:
        own = value.parts[place]
        total = build.op(
            "Sum", [own, axes_value.parts[place]], T=own.dtype, Tidx=axes_value.dtype, keep_dims=keep
        )
        number, count = rows.factor, build.cast(group.total, own.dtype)
        for axis in others:
            size = value.sizes[axis]
            if size is None:
                count = build.binary("Mul", count, build.cast(build.entry(build.shape(own), axis), own.dtype))
            else:
                number *= size
        return build.binary("RealDiv", total, build.times(count, number))

    mean = step.by_part(part, PARTIAL, op.outputs[0].shape)
    return [step.counted_once(mean) if value.of_weight else mean]


def _combined(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value]:
    """Reduces each replica's rows, gathers the results, and reduces these."""
    (own,) = step.each(op, inputs, PARTIAL)
    build, shards, of_weight = step.build, step.replicas.shards, inputs[0].of_weight
    shape = None if own.shape is None else (shards.parts if of_weight else step.replicas.world, *own.shape)
    rows = [build.expand(part, 0) for part in own.parts]
    rows = rows if of_weight else step.counted_rows(rows)
    in_group = of_weight and shards.several
    known = {"dim": 0, "rows": None, "shape": shape, "made_by": op, "in_group": in_group}
    (gathered,) = build.node(ALL_GATHER, rows, known, [own.dtype])
    types = {} if op.type in ("All", "Any") else {"T": own.dtype}
    ref = build.op(op.type, [gathered, build.constant(0, tf.int32)], Tidx=tf.int32, keep_dims=False, **types)
    return [Value((ref,) * step.replicas.here, REPLICATED, own.shape)]


@rule("L2Loss", for_weights=True)
def _l2_loss(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return _summed(step, op, inputs) if inputs[0].sharded else None


@rule("BiasAddGrad")
def _bias_gradient(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    if value.partial:
        return step.each(op, inputs, PARTIAL)
    if value.sharded is None or value.rank is None:
        return None
    channel = 1 if op.attribute("data_format") == b"NCHW" else value.rank - 1
    return step.each(op, inputs, PARTIAL if value.sharded.dim != channel else value.sharded.along(0))


@rule("UnsortedSegmentSum")
def _segment_sum(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    data, ids, number = inputs
    if data.sharded is None or ids.rank is None or not number.replicated:
        return None
    if ids.replicated and data.sharded.dim >= ids.rank:  # each replica has a part of every segment's entries
        return step.each(op, inputs, data.sharded.along(data.sharded.dim - ids.rank + 1))
    if data.layout != ids.layout:
        return None
    (total,) = step.each(op, inputs, PARTIAL)
    return [dataclasses.replace(total, slices=(data, ids))]


@rule("ScatterNd")
def _scattered(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Each replica adds its rows to zeros."""
    indices, updates, shape = inputs
    lead = indices.sharded
    alike = lead is not None and lead.dim == 0 and indices.layout == updates.layout and shape.replicated
    number = op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_integer
    if not (alike and number):
        return None
    return step.each(op, inputs, PARTIAL)


@rule("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2")
def _along_axis(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, axis = inputs
    if value.partial and op.type in ("Cumsum", "ReverseV2") and axis.replicated:
        return step.each(op, inputs, PARTIAL)
    if value.sharded is None or value.rank is None:
        return None
    axes, dim = axes_of(axis, value.rank), value.sharded.dim
    if axes is None or dim in axes:
        return None
    moved = op.type.startswith("Arg") and axes[0] < dim
    return step.each(op, inputs, value.sharded.along(dim - moved))
