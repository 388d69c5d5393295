"""Describes what a metric's `update_state` is called with, so that calls can be compared and made again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.keras_engine.input import map_leaves
from dtrain.upstream import keras as upstream_keras

_UNKNOWN = 3  # what a dimension of unknown size is taken for


@dataclass(frozen=True)
class Rows:
    """An argument that has a row for each example.

    Attributes:
        dtype: of its elements.
        shape: of a row.
        mask: the shape of a row of its Keras mask; None where it has none.
        dense: whether it is a plain tensor; what is not cannot be tried.
    """

    dtype: tf.DType
    shape: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None
    dense: bool = True

    @property
    def elements(self) -> int:
        """In one row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Number:
    """An argument that is one number a step.

    Attributes:
        dtype: its.
    """

    dtype: tf.DType


@dataclass(frozen=True)
class Arguments:
    """What `update_state` is called with.

    Attributes:
        leaves: `Rows`, `Number`s, and all else as it is.
        structure: the positional and the named arguments, with places in `leaves`.
    """

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Arguments:
        """The arguments of a call; tensors are described, not kept."""
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
        """What calls of the same kind have in common."""
        kinds = [
            each if isinstance(each, Rows | Number) else type(each).__name__ if each is not None else None
            for each in self.leaves
        ]
        return f"{kinds} {self.structure}"

    def visit(self, args: Any, kwargs: Any, function: Callable[[Any, Any], Any]) -> None:
        """Calls a function with each leaf of the arguments and what it was described as, in order."""
        kinds = iter(self.leaves)
        map_leaves(lambda leaf: function(leaf, next(kinds)), (tuple(args), dict(kwargs)))

    def filled(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """The positional and the named arguments of a call."""
        found: tuple[Any, Any] = map_leaves(lambda place: values[place], self.structure)
        return found

    @property
    def have_rows(self) -> bool:
        """Whether any argument has a row for each example."""
        return any(isinstance(each, Rows) for each in self.leaves)

    @property
    def have_numbers(self) -> bool:
        """Whether any argument is one number a step."""
        return any(isinstance(each, Number) for each in self.leaves)


def described(leaf: Any, lengths: set[int | None]) -> Any:
    """`Rows`, a `Number`, or the leaf itself: what is no tensor, or is known, is the same on all replicas.

    Args:
        leaf: of the arguments of a call.
        lengths: how many rows those have that are computed; what is known and has as many goes with them.
    """
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
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
    mask = upstream_keras.mask_of(leaf)
    return Rows(
        leaf.dtype, _row(leaf), None if mask is None else _row(mask), dense=leaf.shape.rank is not None
    )


def _known(tensor: Any) -> Any:
    return None if tf.executing_eagerly() else tf.get_static_value(tensor)


def _length(leaf: Any) -> set[int | None]:
    """How many rows a tensor has that is computed, in a set; None for what is not known."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or _known(leaf) is not None:
        return set()
    return {leaf.shape[0]}


def _row(tensor: Any) -> tuple[int, ...]:
    return tuple(_UNKNOWN if n is None else n for n in tensor.shape[1:]) if tensor.shape.rank else ()
