"""Prepares sparse gradients, slices of named rows of a table (`tf.IndexedSlices`), for the all-reduce.

Keras' optimizers square each slice by itself, so the result must have the slices that one device would have.
A lookup by example has one slice per example, on any replica. A lookup that is the same for all examples,
such as one of positions, has its slices once, not once per replica. The all-reduce
itself is in `gradients.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.interfaces.managed_strategy import current_layout
from dtrain.upstream import graph_functions

BY_EXAMPLE = "by example"  # each slice belongs to one example: the replicas' slices are concatenated
COMMON = "common"  # the same rows on each replica, in the same order: equal slices are summed
DISTINCT = "distinct"  # each replica names a row at most once, as one device would: equal rows are summed
UNKNOWN = "unknown"  # eager tensors have no graph that shows what they are computed from

_ROWS = 1 << 32  # more rows than any table has: a COMMON slice's key is its row plus its index times this
_PASSED_ON = ("Identity", "StopGradient", "Cast")
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
_READS = ("ReadVariableOp", "VarHandleOp", "ResourceGather", "StatefulPartitionedCall")


@dataclass(frozen=True)
class Lookups:
    """The lookups that a sparse gradient comes from; it holds their slices one lookup after another.

    Attributes:
        kinds: the kind of each lookup, such as `BY_EXAMPLE`.
        sizes: the number of slices of each lookup, an int32 vector; None for a single lookup.
    """

    kinds: tuple[str, ...]
    sizes: Any = None

    @classmethod
    def of(cls, gradient: tf.IndexedSlices) -> Lookups:
        """Finds a gradient's lookups; must be called in the graph that computes the gradient."""
        if tf.executing_eagerly():
            return cls((UNKNOWN,))
        lookups = _lookups(gradient.indices)
        kinds = tuple(_kind(lookup) for lookup in lookups)
        if set(kinds) == {BY_EXAMPLE}:
            return cls((BY_EXAMPLE,))
        return cls(kinds, tf.stack([tf.size(lookup) for lookup in lookups]) if len(kinds) > 1 else None)

    def split(self, gradient: Any) -> list[Any]:
        """The gradient in parts of one kind each, ready for the all-reduce; all `BY_EXAMPLE` are one part."""
        if self.kinds == (BY_EXAMPLE,):
            return [gradient]
        values, indices = [gradient.values], [gradient.indices]
        if self.sizes is not None:
            values = tf.split(gradient.values, self.sizes, num=len(self.kinds))
            indices = tf.split(gradient.indices, self.sizes, num=len(self.kinds))
        parts = []
        by_example = [i for i, kind in enumerate(self.kinds) if kind == BY_EXAMPLE]
        if by_example:
            rows = tf.concat([indices[i] for i in by_example], axis=0)
            parts.append(_slices(gradient, tf.concat([values[i] for i in by_example], axis=0), rows))
        for i, kind in enumerate(self.kinds):
            if kind != BY_EXAMPLE:
                parts.append(_slices(gradient, values[i], _keys(indices[i], kind)))
        return parts

    def joined(self, parts: list[Any], gradient: Any) -> Any:
        """The all-reduced gradient, from its all-reduced parts.

        Args:
            parts: the parts that `split` returned, all-reduced.
            gradient: the gradient that was split.
        """
        if self.kinds == (BY_EXAMPLE,):
            return parts[0]
        apart = [kind for kind in self.kinds if kind != BY_EXAMPLE]
        kinds = [BY_EXAMPLE] * (len(parts) - len(apart)) + apart
        dtype = gradient.indices.dtype
        merged = [_merged(part, kind, dtype) for part, kind in zip(parts, kinds, strict=True)]
        if len(merged) == 1:
            return merged[0]
        values = tf.concat([slices.values for slices in merged], axis=0)
        return _slices(gradient, values, tf.concat([slices.indices for slices in merged], axis=0))


def _slices(gradient: Any, values: Any, indices: Any) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _keys(rows: Any, kind: str) -> Any:
    """Keys that are equal for slices of two replicas that one device would have only once."""
    if kind == UNKNOWN:
        return rows
    keys = tf.cast(rows, tf.int64)
    return keys + tf.range(tf.size(rows, tf.int64)) * _ROWS if kind == COMMON else keys


def _merged(part: Any, kind: str, dtype: tf.DType) -> Any:
    """An all-reduced part, with slices of equal keys summed and keys turned back into rows."""
    if kind == BY_EXAMPLE or (kind == UNKNOWN and not _looks_common(part.indices)):
        return part
    keys, places = tf.unique(part.indices, out_idx=tf.int64)
    values = tf.math.unsorted_segment_sum(part.values, places, tf.size(keys, tf.int64))
    rows = tf.math.floormod(keys, tf.constant(_ROWS, keys.dtype)) if kind == COMMON else keys
    return _slices(part, values, tf.cast(rows, dtype))


def _looks_common(rows: Any) -> bool:
    """Whether eager slices look like a `COMMON` lookup: each replica names the same rows, each row once."""
    layout, rows = current_layout(), rows.numpy()
    if layout is None or len(rows) == 0 or len(rows) % layout.replicas:
        return False
    by_replica = rows.reshape(layout.replicas, -1)
    return (
        bool((by_replica == by_replica[0]).all()) and len(set(by_replica[0].tolist())) == by_replica.shape[1]
    )


def _lookups(rows: Any) -> list[Any]:
    """The rows that a gradient names, a tensor for each lookup; a tape concatenates those of all lookups."""
    op = rows.op
    if op.type in _PASSED_ON or (op.type == "Reshape" and op.inputs[0].shape.rank == 1):
        lookups = _lookups(op.inputs[0])
        return lookups if len(lookups) > 1 else [rows]
    if op.type == "ConcatV2" and rows.shape.rank == 1:
        return [lookup for part in op.inputs[:-1] for lookup in _lookups(part)]
    return [rows]


def _kind(rows: Any) -> str:
    source = rows
    while True:
        op = source.op
        if op.type == "SelectV2" and op.inputs[1].op.type == "AddV2":
            source = op.inputs[2]  # Keras replaces a negative row by `row + rows of the table`
        elif op.type in (*_PASSED_ON, "Reshape"):
            source = op.inputs[0]
        else:
            break
    if source.op.type in ("Unique", "UniqueV2") and source.value_index == 0:
        return DISTINCT
    return BY_EXAMPLE if _depends_on_examples(rows) else COMMON


def _depends_on_examples(tensor: Any) -> bool:
    """Whether a tensor of a graph is computed from the batch, or from values that differ by replica."""
    left, seen = [tensor], set()
    while left:
        source = _from_outside(left.pop())
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        op = source.op
        if op.type in _CONDITIONS:
            left += _from_branches(source)
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
    """The tensors that a result of `tf.cond` or `tf.switch_case` depends on: the branches' and the index."""
    op = tensor.op
    several = "Case" in op.type
    branches = op.get_attr("branches") if several else map(op.get_attr, ("then_branch", "else_branch"))
    graphs = [graph_functions.graph_of_function(op.graph, branch.name) for branch in branches]
    if any(graph is None for graph in graphs):
        return list(op.inputs)
    return [op.inputs[0], *(graph.outputs[tensor.value_index] for graph in graphs)]


def _from_outside(tensor: Any) -> Any:
    """The captured tensor behind a function's placeholder, or the tensor itself; None for an eager value."""
    while isinstance(tensor, tf.Tensor) and hasattr(tensor, "op") and not hasattr(tensor, "numpy"):
        captured = getattr(tensor.graph, "captures", None)
        if tensor.op.type != "Placeholder" or captured is None:
            return tensor
        outer_tensors = [outer for outer, inner in captured if inner is tensor]
        if not outer_tensors:
            return tensor
        tensor = outer_tensors[0]
    return None


def _leaves_out_rows(op: Any) -> bool:
    """Whether a slice of a shape leaves out the first dimension, which is the number of examples."""
    masks = ("ellipsis_mask", "new_axis_mask", "begin_mask")
    begin, _, strides = map(tf.get_static_value, op.inputs[1:])
    if any(op.get_attr(mask) for mask in masks) or begin is None or strides is None or len(begin) != 1:
        return False
    if strides[0] < 0:  # backwards, it may end at the first
        return False
    first, rank = int(begin[0]), op.inputs[0].op.inputs[0].shape.rank
    return first > 0 if first >= 0 else rank is not None and rank + first > 0
