"""Which replicas a process has, and how many rows of a group each of them has."""

from __future__ import annotations

import dataclasses

from dtrain.partition.nodes import Ref
from dtrain.partition.shard_groups import ShardGroups


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """How many rows of a group each replica has.

    Attributes:
        local: the number of rows, by replica of this process.
        begin: the number of the first of them in the whole, likewise.
        total: the number of rows of all replicas.
        known: that number, where the shapes of the batch say it.
        sizes: as `local`, for the sizes of values: an error if there are other rows than the shapes say.
    """

    local: tuple[Ref, ...]
    begin: tuple[Ref, ...]
    total: Ref
    known: int | None
    sizes: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Which replicas a process has.

    Attributes:
        here: the number of replicas of this process.
        world: the number of all replicas.
        first: the number of the first of this process.
        devices: the device of each replica of this process; none if TensorFlow places them.
        shard_groups: which processes divide weights among them; None if all do.
    """

    here: int
    world: int
    first: int = 0
    devices: tuple[str, ...] = ()
    shard_groups: ShardGroups | None = None

    @property
    def shards(self) -> ShardGroups:
        """Which processes divide weights among them."""
        every = tuple(range(self.world // self.here))
        return self.shard_groups or ShardGroups((every,), self.first // self.here, self.here)
