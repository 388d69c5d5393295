"""A tensor of the traced function, as the replicas of this process have it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from dtrain.partition.layouts import (
    LOCAL,
    LOCAL_SIZES,
    REPLICATED,
    Entry,
    Layout,
    ListOf,
    Partial,
    RowCount,
    Sharded,
)
from dtrain.partition.nodes import NodeBlock, Ref
from dtrain.partition.traced import Shape, TracedOperation, TracedTensor


@dataclasses.dataclass(eq=False)
class Value:
    """The parts of a tensor, and their layout.

    Attributes:
        parts: one for each replica of this process.
        layout: how the parts of all replicas make the value.
        shape: the static shape of the whole value.
        entries: of an integer or a vector of integers, what is known of each entry.
        constant: the whole value, where it is known.
        tensor: the traced tensor; None for a value that only the partitioned function has.
        variable_shape: of the handle of a variable, the variable's static shape.
        in_parts: of the handle of a variable, whether the sum of the replicas' copies is its value.
        held: of the handle of a variable that is divided, how.
        read: of such a handle, the whole value that the variable has in a loop, which does not write it.
        views: of a divided weight, the operations on the whole of it that are made when it is whole, each
            with its other inputs: they only arrange its elements anew. `shape` is that of the last one.
        summed, kept: of axes that only the running step knows, those that surely are among them, and not.
        reserved: of a list that has no elements yet, the operation that made it, and its inputs.
        region: of each replica's own value, how the rows of its local region are divided.
        slices: of a sum that is not made yet, the slices and indices of which each replica has its own part,
            if that is all it is made of.
        mark: of a sum that is not made yet, the number by which the caller makes it (`marks.py`).
    """

    parts: tuple[Ref, ...]
    layout: Layout
    shape: Shape
    entries: tuple[Entry, ...] | None = None
    constant: np.ndarray | None = None
    tensor: TracedTensor | None = None
    variable_shape: Shape = None
    in_parts: bool = False
    held: Sharded | None = None
    read: Value | None = None
    views: tuple[tuple[TracedOperation, tuple[Value, ...]], ...] = ()
    summed: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    reserved: tuple[TracedOperation, list[Value]] | None = None
    region: Sharded | None = None
    slices: tuple[Value, Value] | None = None
    mark: int | None = None
    whole: dict[NodeBlock, Value] = dataclasses.field(default_factory=dict, repr=False)
    scattered: dict[tuple[NodeBlock, Sharded], Value] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def dtype(self) -> tf.DType:
        """The type of its elements."""
        return self.parts[0].dtype

    @property
    def rank(self) -> int | None:
        """The number of dimensions; None if it is not known."""
        return None if self.shape is None else len(self.shape)

    @property
    def level(self) -> int:
        """The rounds of communication before it is known."""
        return max(part.level for part in self.parts)

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """Its shape.

        Raises:
            ValueError: not even the number of dimensions is known.
        """
        if self.shape is None:
            raise ValueError("the number of its dimensions is not known")
        return self.shape

    @property
    def division(self) -> Sharded:
        """How it is divided.

        Raises:
            ValueError: it is not divided.
        """
        if not isinstance(self.layout, Sharded):
            raise ValueError(f"a divided value is needed, and this one is {self.layout}")
        return self.layout

    @property
    def sharded(self) -> Sharded | None:
        """Its layout, if it is divided."""
        return self.layout if isinstance(self.layout, Sharded) else None

    @property
    def of_weight(self) -> bool:
        """Whether it is a divided weight, or computed from divided weights alone."""
        return isinstance(self.layout, Sharded) and self.layout.of_weight

    @property
    def partial(self) -> bool:
        """Whether it is a sum that is not yet made."""
        return isinstance(self.layout, Partial)

    @property
    def replicated(self) -> bool:
        """Whether each replica has the whole value."""
        return self.layout == REPLICATED

    @property
    def listed(self) -> ListOf | None:
        """Its layout, if it is a list."""
        return self.layout if isinstance(self.layout, ListOf) else None

    @property
    def counts_rows(self) -> bool:
        """Whether it holds sizes that are each replica's own."""
        return self.layout == LOCAL_SIZES

    @property
    def local(self) -> bool:
        """Whether it is each replica's own."""
        return self.layout == LOCAL

    @property
    def scalar_constant(self) -> int | None:
        """The whole number that it is, where it is known and there is only one."""
        return None if self.constant is None or self.constant.size != 1 else int(self.constant.reshape(-1)[0])


def layout_of_sizes(entries: tuple[Entry, ...]) -> Layout:
    """The layout of an integer value with these entries."""
    return LOCAL_SIZES if any(isinstance(entry, RowCount) for entry in entries) else REPLICATED


def rows_in_shape(value: Value) -> tuple[int, RowCount] | None:
    """The place and the rows of the only entry of a vector of sizes that counts rows, if there is one."""
    counts = [
        (place, entry) for place, entry in enumerate(value.entries or ()) if isinstance(entry, RowCount)
    ]
    return counts[0] if len(counts) == 1 and value.counts_rows else None


def product(sizes: tuple[Entry, ...] | Shape) -> int | None:
    """The product of sizes; None if one is not known."""
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return None
    return math.prod(size for size in sizes if isinstance(size, int))
