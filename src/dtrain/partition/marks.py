"""Marks tensors that the caller or one replica alone makes, such as compressed gradients.

A mark goes along with a sum that is not made yet while others are added to it, such as what was accumulated.
Any other operation gets the sum, made by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from dtrain.partition.layouts import RowCount, Sharded, WeightRows
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value

_NAME = "dtrain_marked_"
_MARKED = re.compile(_NAME + r"(\d+)(_\d+)?$")
_OWNED = "dtrain_owned_"
_BY_OWNER = re.compile(_OWNED + r"(\d+|elsewhere)(_\d+)?$")
_LIKE_WEIGHT = "dtrain_like_weight_"
_DIVIDED = re.compile(_LIKE_WEIGHT + r"(\d+)_of_(\d+)(_\d+)?$")
_ADDING = ("Identity", "IdentityN", "AddV2", "AddN", "AssignAddVariableOp")


def marked(tensor: tf.Tensor, number: int) -> tf.Tensor:
    """The same tensor, marked with a number of the caller's.

    Outside of a step that is partitioned this changes nothing.
    """
    return tf.identity(tensor, name=f"{_NAME}{number}")


def like_weight(tensor: tf.Tensor, shape: Sequence[int], dim: int) -> tf.Tensor:
    """The same tensor, divided as a weight of a shape is that is divided along a dimension.

    Outside of a step that is partitioned this changes nothing.
    """
    return tf.identity(tensor, name=f"{_LIKE_WEIGHT}{dim}_of_{shape[dim]}")


def division_by(op: TracedOperation) -> Sharded | None:
    """How `like_weight` divides an operation's result; None if it is another one."""
    match = _DIVIDED.search(op.name)
    return Sharded(int(match[1]), RowCount(WeightRows(int(match[2])))) if match else None


def of_owner(tensor: tf.Tensor, place: int | None, needed: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensor of the replica that owns it, on all replicas. Other processes may trace another step for it.

    Args:
        tensor: the tensor; on a process that does not own it, any tensor of the same shape and type.
        place: the owner's place among the replicas of this process; None if it belongs to another one.
        needed: tensors that are known on each replica before this one is sent: the same ones everywhere.
    """
    where = "elsewhere" if place is None else place
    owned: tf.Tensor = tf.raw_ops.IdentityN(input=[tensor, *needed], name=f"{_OWNED}{where}")[0]
    return owned


def place_of_owner(op: TracedOperation) -> tuple[bool, int | None]:
    """Whether an operation is that of `of_owner`, and the owner's place in this process."""
    match = _BY_OWNER.search(op.name)
    return (True, int(match[1]) if match[1].isdigit() else None) if match else (False, None)


def keeps_mark(op: TracedOperation) -> bool:
    """Whether an operation can have sums that are marked and not made yet."""
    return op.type in _ADDING or op.control_flow


def carry_marks(op: TracedOperation, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Marks what an operation returns."""
    own = _MARKED.search(op.name) if op.type == "Identity" else None
    sums = [value.mark for value in inputs if value.partial]
    for place, output in enumerate(outputs):
        marks = [inputs[place].mark] if op.type == "IdentityN" else [int(own[1])] if own else sums
        known = {mark for mark in marks if mark is not None}
        if output.partial and len(known) == 1:
            (output.mark,) = known
