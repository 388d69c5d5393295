"""Rules for products of tensors, by labels of dimensions: those that the result lacks are summed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from dtrain.partition.layouts import PARTIAL, REPLICATED, Sharded
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.rules.elementwise import stays_partial
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value


def contraction(
    step: Partitioner,
    op: TracedOperation,
    inputs: list[Value],
    labels: Sequence[Sequence[Hashable]],
    result: Sequence[Hashable],
) -> list[Value] | None:
    """A product of one or two tensors.

    Args:
        step: the partitioner.
        op: the operation.
        inputs: its inputs.
        labels: the labels of each input's dimensions.
        result: the labels of the result's dimensions.
    """
    inputs = [step.whole_sizes(value) for value in inputs]
    inputs = [  # an element of a list may have no static shape
        dataclasses.replace(value, shape=(None,) * len(names)) if value.shape is None else value
        for value, names in zip(inputs, labels, strict=True)
    ]
    sums = [value for value in inputs if value.partial]
    if sums:
        others = [value for value in inputs if not value.partial]
        if len(sums) == 1 and all(value.replicated for value in others) and stays_partial(sums[0], others):
            return step.each(op, inputs, PARTIAL)
        inputs = [step.whole(value) if value.partial else value for value in inputs]
    divided = [place for place, value in enumerate(inputs) if value.sharded]
    if not divided:
        return step.each(op, inputs, REPLICATED)
    lead = inputs[divided[0]].division
    label = labels[divided[0]][lead.dim]
    operands = []
    for value, names in zip(inputs, labels, strict=True):
        if list(names).count(label) > 1:
            return None
        if label not in names:
            operands.append(step.whole(value))
            continue
        dim = list(names).index(label)
        if value.shape is not None and value.shape[dim] == 1 and value.sharded is None:
            return None  # whether it is broadcast depends on the operation
        operands.append(step.divided(value, Sharded(dim, lead.rows)))
    return step.each(
        op, operands, Sharded(list(result).index(label), lead.rows) if label in result else PARTIAL
    )


@rule("MatMul")
def _matmul(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    left = "ki" if op.attribute("transpose_a") else "ik"
    right = "jk" if op.attribute("transpose_b") else "kj"
    return contraction(step, op, inputs, [left, right], "ij")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    ranks = [value.rank for value in inputs if value.rank is not None]
    if len(ranks) < len(inputs):
        return None
    outer: list[Hashable] = [("outer", index) for index in range(max(ranks) - 2)]
    labels: list[list[Hashable]] = []
    for place, (value, rank) in enumerate(zip(inputs, ranks, strict=True)):
        own = outer[len(outer) - (rank - 2) :]
        # A dimension of one entry is broadcast: it is not the other's.
        own = [name if value.sizes[dim] != 1 else ("one", place, dim) for dim, name in enumerate(own)]
        inner: list[Hashable] = [["i", "k"], ["k", "j"]][place]  # type: ignore[assignment]
        if op.attribute(("adj_x", "adj_y")[place]):
            inner = inner[::-1]
        labels.append([*own, *inner])
    return contraction(step, op, inputs, labels, [*outer, "i", "j"])


@rule("Einsum")
def _einsum(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    left, result = op.attribute("equation").decode().replace(" ", "").split("->")
    names = left.split(",")
    if "." in left:
        ranks = [value.rank for value in inputs if value.rank is not None]
        if len(ranks) < len(inputs):
            return None
        counts = [rank - len(name.replace(".", "")) for name, rank in zip(names, ranks, strict=True)]
        most = max(counts)
        filled: list[list[Hashable]] = []
        for name, count in zip(names, counts, strict=True):
            before, dots, after = name.partition("...")
            middle: list[Hashable] = (
                [("dots", most - count + place) for place in range(count)] if dots else []
            )
            filled.append([*before, *middle, *after])
        before, dots, after = result.partition("...")
        middle = [("dots", place) for place in range(most)] if dots else []
        broadcast = any(
            value.shape is not None and value.shape[dim] == 1 and isinstance(label, tuple)
            for value, own in zip(inputs, filled, strict=True)
            for dim, label in enumerate(own)
        )
        return None if broadcast else contraction(step, op, inputs, filled, [*before, *middle, *after])
    return contraction(step, op, inputs, [list(name) for name in names], list(result))
