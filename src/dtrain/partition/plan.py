"""What the replicas of a partitioned function communicate, and why: the plan, read from the nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import tensorflow as tf

from dtrain.partition.layouts import RowCount
from dtrain.partition.nodes import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, Node, NodeBlock
from dtrain.partition.traced import Shape, TracedOperation

Kind = Literal["sum", "gather", "scatter"]
KINDS: tuple[Kind, ...] = ("sum", "gather", "scatter")

_KIND_OF: dict[str, Kind] = {ALL_REDUCE: "sum", ALL_GATHER: "gather", REDUCE_SCATTER: "scatter"}


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One value that the replicas make whole together.

    Attributes:
        kind: "sum" if each has a summand, "gather" if each has some of the rows, "scatter" if each has a
            summand and gets some of the rows of the sum.
        made_by: the traced operation that computes the value; None if the partitioner made it.
        needed_by: the traced operation that needs it whole; None if it is a result of the function.
        round: the number of the round, from 1.
        nested: whether it is done in a loop or branch, as often as its body runs.
        dtype: the type of the value.
        shape: its static shape.
        rows: the divided dimension, and what its entries count; None of a sum, or if each replica has one.
    """

    kind: Kind
    made_by: TracedOperation | None
    needed_by: TracedOperation | None
    round: int
    nested: bool
    dtype: tf.DType
    shape: Shape
    rows: tuple[int, RowCount] | None

    def bytes(self, rows: int | None = None) -> int | None:
        """The size of the whole value in bytes; None if its shape is not known.

        A value of rows that were selected from the batch has at most this size.

        Args:
            rows: the rows of the batch; None if they are not known.
        """
        sizes: list[int | None] = [None] if self.shape is None else list(self.shape)
        if self.rows is not None and self.shape is not None:
            dim, counted = self.rows
            if sizes[dim] is None and rows is not None:
                sizes[dim] = rows * counted.factor
        known = [size for size in sizes if size is not None]
        return math.prod(known) * max(self.dtype.size, 1) if len(known) == len(sizes) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What the replicas of a function communicate.

    Attributes:
        rounds: how often they communicate, one call after another.
        communications: what they communicate, in the order of the rounds.
        gathered: the operations that no rule divides, and that got divided inputs whole.
    """

    rounds: int
    communications: tuple[PlannedCollective, ...]
    gathered: tuple[TracedOperation, ...]

    def bytes(self, kind: Kind, rows: int | None = None) -> int:
        """The bytes of all sums or gathers whose size is known; those of a loop's body count once."""
        return sum(
            collective.bytes(rows) or 0 for collective in self.communications if collective.kind == kind
        )

    def gathered_for(self, op: TracedOperation) -> list[PlannedCollective]:
        """What is gathered since an operation needs it; nothing if an earlier one needed the same."""
        return [
            collective
            for collective in self.communications
            if collective.kind == "gather" and collective.needed_by is op
        ]


def plan_of(block: NodeBlock, gathered: Sequence[TracedOperation]) -> Plan:
    """The plan of a partitioned function.

    Args:
        block: the nodes of the replicas of this process.
        gathered: the operations that no rule divides.
    """
    communications = sorted(_communications(block), key=lambda collective: collective.round)
    needed = {collective.needed_by for collective in communications}
    rounds = max((node.level_after for node in block.needed()), default=0)
    return Plan(rounds, tuple(communications), tuple(op for op in gathered if op in needed))


def _communications(block: NodeBlock, around: Node | None = None) -> Iterator[PlannedCollective]:
    for node in block.needed():
        if node.type in COLLECTIVES:
            yield _communication(node, around)
        for body in node.bodies:
            yield from _communications(body, around or node)


def _communication(node: Node, around: Node | None) -> PlannedCollective:
    known: Any = node.attributes
    return PlannedCollective(
        _KIND_OF[node.type],
        known["made_by"],
        node.source,
        (around or node).level + 1,
        around is not None,
        node.dtypes[0],
        known["shape"],
        (known["dim"], known["rows"]) if node.type == ALL_GATHER and known["rows"] else None,
    )
