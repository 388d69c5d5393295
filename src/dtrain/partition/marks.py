"""Marks tensors whose sums over the replicas the caller makes in its own way, such as compressed gradients.

A mark goes along with a sum that is not made yet while others are added to it, such as what was accumulated.
Any other operation gets the sum, made by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value

_NAME = "dtrain_marked_"
_MARKED = re.compile(_NAME + r"(\d+)(_\d+)?$")
_ADDING = ("Identity", "IdentityN", "AddV2", "AddN", "AssignAddVariableOp")


def marked(tensor: tf.Tensor, number: int) -> tf.Tensor:
    """The same tensor, marked with a number of the caller's.

    Outside of a step that is partitioned this changes nothing.
    """
    return tf.identity(tensor, name=f"{_NAME}{number}")


def keeps_mark(op: TracedOperation) -> bool:
    """Whether an operation can have sums that are marked and not made yet."""
    return op.type in _ADDING or op.control_flow


def carry_marks(op: TracedOperation, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Marks what an operation returns."""
    own = _MARKED.search(op.name) if op.type == "Identity" else None
    sums = [value.mark for value in inputs if value.partial]
    for place, output in enumerate(outputs):
        found = [inputs[place].mark] if op.type == "IdentityN" else [int(own[1])] if own else sums
        known = {mark for mark in found if mark is not None}
        if output.partial and len(known) == 1:
            (output.mark,) = known
