"""Describes the arguments of a metric's `update_state`, so that calls can be compared and repeated.

The descriptions hold no tensors. `metric_trial.py` makes the calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.engine.batches.batch_rows import is_dense, map_leaves
from dtrain.upstream import layer_calls

_UNKNOWN = 3  # the size that is assumed for a dimension of unknown size


@dataclass(frozen=True)
class Rows:
    """An argument that has a row for each example.

    Attributes:
        dtype: the dtype of its elements.
        shape: the shape of one row.
        mask: the shape of one row of its Keras mask; None if it has no mask.
        dense: whether it is a dense tensor of known rank; others cannot be used in a trial.
    """

    dtype: tf.DType
    shape: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None
    dense: bool = True

    @property
    def elements(self) -> int:
        """The number of elements in one row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Number:
    """An argument that is one number per step.

    Attributes:
        dtype: the dtype of the number.
    """

    dtype: tf.DType


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call of `update_state`.

    Attributes:
        leaves: a `Rows` or a `Number` for each tensor; all other leaves as they are.
        structure: the positional and the named arguments, with an index into `leaves` for each leaf.
    """

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Arguments:
        """Describes the arguments of a call; it keeps no tensors."""
        leaves: list[Any] = []
        lengths: set[int | None] = set()
        map_leaves(lambda leaf: lengths.update(_length(leaf)), (tuple(args), dict(kwargs)))

        def number(leaf: Any) -> int:
            leaves.append(described(leaf, lengths))
            return len(leaves) - 1

        structure = map_leaves(number, (tuple(args), dict(kwargs)))
        return cls(tuple(leaves), structure)

    @property
    def key(self) -> str:
        """A text that is the same for all calls of one kind."""
        kinds = [
            leaf if isinstance(leaf, Rows | Number) else type(leaf).__name__ if leaf is not None else None
            for leaf in self.leaves
        ]
        return f"{kinds} {self.structure}"

    def visit(self, args: Any, kwargs: Any, function: Callable[[Any, Any], Any]) -> None:
        """Calls a function with each leaf of a call's arguments and its description, in order."""
        kinds = iter(self.leaves)
        map_leaves(lambda leaf: function(leaf, next(kinds)), (tuple(args), dict(kwargs)))

    def filled(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """The positional and the named arguments of a call, with these values for the leaves."""
        arguments: tuple[Any, Any] = map_leaves(lambda place: values[place], self.structure)
        return arguments

    @property
    def have_rows(self) -> bool:
        """Whether any argument has a row for each example."""
        return any(isinstance(leaf, Rows) for leaf in self.leaves)

    @property
    def have_numbers(self) -> bool:
        """Whether any argument is one number per step."""
        return any(isinstance(leaf, Number) for leaf in self.leaves)


def described(leaf: Any, lengths: set[int | None]) -> Any:
    """Describes one leaf of the arguments of a call.

    A leaf that is not a tensor, or whose value is known while tracing, is the same on all replicas.

    Args:
        leaf: a leaf of the arguments.
        lengths: the numbers of rows of the tensors that are computed. A tensor of known value that has as
            many rows counts as having a row for each example.

    Returns:
        `Rows`, a `Number`, or the leaf's own value.
    """
    if not is_dense(leaf):
        return Rows(leaf.dtype, dense=False)
    if tf.executing_eagerly() and isinstance(leaf, np.ndarray | np.generic | float):
        leaf = tf.convert_to_tensor(leaf)
    if not isinstance(leaf, tf.Tensor):
        return leaf
    known = _known(leaf)
    if known is not None and (leaf.shape.rank == 0 or (lengths and leaf.shape[0] not in lengths)):
        return known
    if leaf.shape.rank == 0:
        return Number(leaf.dtype)
    mask = layer_calls.mask_of(leaf)
    return Rows(
        leaf.dtype, _row(leaf), None if mask is None else _row(mask), dense=leaf.shape.rank is not None
    )


def _known(tensor: Any) -> Any:
    return None if tf.executing_eagerly() else tf.get_static_value(tensor)


def _length(leaf: Any) -> set[int | None]:
    """A set with the number of rows of a computed tensor, None if unknown; empty for other leaves."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or _known(leaf) is not None:
        return set()
    return {leaf.shape[0]}


def _row(tensor: Any) -> tuple[int, ...]:
    return tuple(_UNKNOWN if n is None else n for n in tensor.shape[1:]) if tensor.shape.rank else ()
