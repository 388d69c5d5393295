"""Sums gradients over the replicas where some of them name rows of a table (`tf.IndexedSlices`).

One device's rule holds for rows that are named twice, since Keras' optimizers square each slice by itself: a
lookup of the examples' own rows has a slice an example, wherever the example is; one that is the same for
all examples, such as that of positions, has its slices once, not once a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import all_reduce_sum
from dtrain.keras_engine.protocol import current_layout
from dtrain.upstream import tensorflow as upstream_tf

BY_EXAMPLE = "by example"  # a slice is of one example, so the slices of all replicas are put together
COMMON = "common"  # the same rows on each replica, in the same order
DISTINCT = "distinct"  # each replica names each of its rows once, and so would one device
UNKNOWN = "unknown"  # eager tensors do not tell what they are computed from

_ROWS = 1 << 32  # more than a table has: a slice's place among the others times this is added to its row
_PASSED_ON = ("Identity", "StopGradient", "Cast")
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
_READS = ("ReadVariableOp", "VarHandleOp", "ResourceGather", "StatefulPartitionedCall")


def sum_gradients(gradients: Sequence[Any], lookups: Sequence[Lookups] | None = None) -> list[Any]:
    """The sums over all replicas; must be called in a replica.

    Args:
        gradients: tensors or `tf.IndexedSlices`.
        lookups: what each of them is of; None finds it out.
    """
    lookups = [Lookups.of(gradient) for gradient in gradients] if lookups is None else lookups
    parts = [each.split(gradient) for each, gradient in zip(lookups, gradients, strict=True)]
    reduced = iter(all_reduce_sum([part for found in parts for part in found]))
    return [
        each.joined([next(reduced) for _ in found], gradient)
        for each, found, gradient in zip(lookups, parts, gradients, strict=True)
    ]


def on_present(function: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> list[Any]:
    """What a function makes of the values that are there, each in its place; None where there is none."""
    present = [value for value in values if value is not None]
    made = iter(function(present) if present else ())
    return [None if value is None else next(made) for value in values]


@dataclass(frozen=True)
class Lookups:
    """The lookups that a gradient is of, one after another.

    Attributes:
        kinds: of each of them; () for a gradient that names no rows.
        sizes: how many slices each of them has, an int32 vector; None for a single one.
    """

    kinds: tuple[str, ...] = ()
    sizes: Any = None

    @classmethod
    def of(cls, gradient: Any) -> Lookups:
        """Finds out what a gradient is of; must be called in the graph that computes it."""
        if not isinstance(gradient, tf.IndexedSlices):
            return cls()
        if tf.executing_eagerly():
            return cls((UNKNOWN,))
        lookups = _lookups(gradient.indices)
        kinds = tuple(_kind(each) for each in lookups)
        if set(kinds) == {BY_EXAMPLE}:
            return cls((BY_EXAMPLE,))
        return cls(kinds, tf.stack([tf.size(each) for each in lookups]) if len(kinds) > 1 else None)

    def split(self, gradient: Any) -> list[Any]:
        """The gradient in parts of one kind each, made ready for the sum; those by example are one part."""
        if not self.kinds or self.kinds == (BY_EXAMPLE,):
            return [gradient]
        values, indices = [gradient.values], [gradient.indices]
        if self.sizes is not None:
            values = tf.split(gradient.values, self.sizes, num=len(self.kinds))
            indices = tf.split(gradient.indices, self.sizes, num=len(self.kinds))
        found = []
        each = [i for i, kind in enumerate(self.kinds) if kind == BY_EXAMPLE]
        if each:
            rows = tf.concat([indices[i] for i in each], axis=0)
            found.append(_slices(gradient, tf.concat([values[i] for i in each], axis=0), rows))
        for i, kind in enumerate(self.kinds):
            if kind != BY_EXAMPLE:
                found.append(_slices(gradient, values[i], _keys(indices[i], kind)))
        return found

    def joined(self, parts: list[Any], gradient: Any) -> Any:
        """The sums of the parts, in one.

        Args:
            parts: as `split` gave them, summed over the replicas.
            gradient: what was split.
        """
        if not self.kinds or self.kinds == (BY_EXAMPLE,):
            return parts[0]
        apart = [kind for kind in self.kinds if kind != BY_EXAMPLE]
        kinds = [BY_EXAMPLE] * (len(parts) - len(apart)) + apart
        dtype = gradient.indices.dtype
        merged = [_merged(part, kind, dtype) for part, kind in zip(parts, kinds, strict=True)]
        if len(merged) == 1:
            return merged[0]
        values = tf.concat([each.values for each in merged], axis=0)
        return _slices(gradient, values, tf.concat([each.indices for each in merged], axis=0))


def _slices(gradient: Any, values: Any, indices: Any) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _keys(rows: Any, kind: str) -> Any:
    """What is equal for slices of two replicas that one device has once."""
    if kind == UNKNOWN:
        return rows
    keys = tf.cast(rows, tf.int64)
    return keys + tf.range(tf.size(rows, tf.int64)) * _ROWS if kind == COMMON else keys


def _merged(part: Any, kind: str, dtype: tf.DType) -> Any:
    """Slices with equal keys, added up."""
    if kind == BY_EXAMPLE or (kind == UNKNOWN and not _looks_common(part.indices)):
        return part
    keys, places = tf.unique(part.indices, out_idx=tf.int64)
    values = tf.math.unsorted_segment_sum(part.values, places, tf.size(keys, tf.int64))
    rows = tf.math.floormod(keys, tf.constant(_ROWS, keys.dtype)) if kind == COMMON else keys
    return _slices(part, values, tf.cast(rows, dtype))


def _looks_common(rows: Any) -> bool:
    """Whether eager slices are of a lookup that all replicas have made alike, of different rows."""
    layout, rows = current_layout(), rows.numpy()
    if layout is None or len(rows) == 0 or len(rows) % layout.replicas:
        return False
    each = rows.reshape(layout.replicas, -1)
    return bool((each == each[0]).all()) and len(set(each[0].tolist())) == each.shape[1]


def _lookups(rows: Any) -> list[Any]:
    """The rows that a gradient names, by the lookups that it is of: a tape puts them one after another."""
    op = rows.op
    if op.type in _PASSED_ON or (op.type == "Reshape" and op.inputs[0].shape.rank == 1):
        found = _lookups(op.inputs[0])
        return found if len(found) > 1 else [rows]
    if op.type == "ConcatV2" and rows.shape.rank == 1:
        return [lookup for each in op.inputs[:-1] for lookup in _lookups(each)]
    return [rows]


def _kind(rows: Any) -> str:
    source = rows
    while True:
        op = source.op
        if op.type == "SelectV2" and op.inputs[1].op.type == "AddV2":
            source = op.inputs[2]  # Keras counts negative rows from the end
        elif op.type in (*_PASSED_ON, "Reshape"):
            source = op.inputs[0]
        else:
            break
    if source.op.type in ("Unique", "UniqueV2") and source.value_index == 0:
        return DISTINCT
    return BY_EXAMPLE if _depends_on_examples(rows) else COMMON


def _depends_on_examples(tensor: Any) -> bool:
    """Whether a tensor of a graph is computed from the batch, or from what differs by replica."""
    left, seen = [tensor], set()
    while left:
        each = _from_outside(left.pop())
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        op = each.op
        if op.type in _CONDITIONS:
            left += _from_branches(each)
            continue
        if op.type in ("Placeholder", "PlaceholderWithDefault") or "Random" in op.type:
            return True
        if op.op_def.is_stateful and op.type not in _READS:
            return True
        if op.type == "StridedSlice" and op.inputs[0].op.type == "Shape" and _leaves_out_rows(op):
            continue
        left += op.inputs
    return False


def _from_branches(tensor: Any) -> list[Any]:
    """What a result of `tf.cond` or `tf.switch_case` is one of, and what decides which."""
    op = tensor.op
    several = "Case" in op.type
    branches = op.get_attr("branches") if several else map(op.get_attr, ("then_branch", "else_branch"))
    graphs = [upstream_tf.graph_of_function(op.graph, branch.name) for branch in branches]
    if any(graph is None for graph in graphs):
        return list(op.inputs)
    return [op.inputs[0], *(graph.outputs[tensor.value_index] for graph in graphs)]


def _from_outside(tensor: Any) -> Any:
    """What a function has captured, in the place of its own name for it; None for a value that is known."""
    while isinstance(tensor, tf.Tensor) and hasattr(tensor, "op") and not hasattr(tensor, "numpy"):
        captured = getattr(tensor.graph, "captures", None)
        if tensor.op.type != "Placeholder" or captured is None:
            return tensor
        found = [outer for outer, inner in captured if inner is tensor]
        if not found:
            return tensor
        tensor = found[0]
    return None


def _leaves_out_rows(op: Any) -> bool:
    """Whether what is taken of a shape is other than its first dimension, the number of examples."""
    masks = ("ellipsis_mask", "new_axis_mask", "begin_mask")
    begin, _, strides = map(tf.get_static_value, op.inputs[1:])
    if any(op.get_attr(mask) for mask in masks) or begin is None or strides is None or len(begin) != 1:
        return False
    if strides[0] < 0:  # backwards, it may end at the first
        return False
    first, rank = int(begin[0]), op.inputs[0].op.inputs[0].shape.rank
    return first > 0 if first >= 0 else rank is not None and rank + first > 0
