"""Layouts: how the parts of the replicas make one tensor of the traced function.

The model is GSPMD (arXiv 2105.04663). Parts may have different numbers of rows, also none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable


@dataclasses.dataclass(frozen=True)
class WeightRows:
    """The key of the row group of a weight of which each replica holds some entries of one dimension.

    Attributes:
        number: the entries of the whole dimension.
    """

    number: int

    def of_replicas(self, replicas: int) -> list[int]:
        """How many entries each replica of a shard group holds: as equally many as possible."""
        least, more = divmod(self.number, replicas)
        return [least + (replica < more) for replica in range(replicas)]

    def bounds(self, replicas: int) -> list[tuple[int, int]]:
        """The first entry of each replica, and the one behind its last."""
        return [*itertools.pairwise(itertools.accumulate(self.of_replicas(replicas), initial=0))]


@dataclasses.dataclass(frozen=True)
class RowCount:
    """What a divided dimension counts: `factor` entries for each row of a row group.

    Attributes:
        group: the key of the row group: the batch, rows that were selected later, or `WeightRows`.
        factor: the number of entries for each of its rows.
    """

    group: Hashable
    factor: int = 1

    def times(self, number: int) -> RowCount:
        """The rows of a dimension with `number` times as many entries."""
        return RowCount(self.group, self.factor * number)


Entry = int | RowCount | None
"""An entry of a vector of sizes: its value, or what it counts, or None if neither is known."""


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Each replica has the whole value."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The parts of the replicas, one after another along `dim`, are the value.

    Attributes:
        dim: the divided dimension, from 0.
        rows: what its entries count.
    """

    dim: int
    rows: RowCount

    @property
    def of_weight(self) -> bool:
        """Whether a weight is divided, and not what is computed for each example."""
        return isinstance(self.rows.group, WeightRows)

    def along(self, dim: int) -> Sharded:
        """The layout of the same rows along another dimension."""
        return Sharded(dim, self.rows)


@dataclasses.dataclass(frozen=True)
class Partial:
    """The sum of the replicas' values is the value."""


@dataclasses.dataclass(frozen=True)
class LocalSizes:
    """An integer, or a vector of integers, of which those that count rows are each replica's own.

    Which entries count rows is in `Value.entries`.
    """


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of tensors, each of the same layout.

    Attributes:
        element: the layout of the elements; None while the list has none.
        shape: the static shape of a whole element; None if it is not known.
        entries: of elements that are sizes, what is known of their entries.
    """

    element: Layout | None = None
    shape: tuple[int | None, ...] | None = None
    entries: tuple[Entry, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Local:
    """Each replica's own value, in a local region (`local_regions.py`)."""


Layout = Replicated | Sharded | Partial | LocalSizes | ListOf | Local

REPLICATED, PARTIAL, LOCAL_SIZES, LOCAL = Replicated(), Partial(), LocalSizes(), Local()
