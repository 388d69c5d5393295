"""Which processes divide weights among them: shard groups, each of which holds the whole model.

It says who holds which entries of a weight. What is communicated is decided elsewhere.
"""

from __future__ import annotations

import dataclasses

from dtrain.partition.layouts import WeightRows


@dataclasses.dataclass(frozen=True)
class ShardGroups:
    """The shard groups of a job, as one of its processes sees them.

    Attributes:
        groups: the processes of each group. All groups have as many. A weight's parts follow each other in
            the order of the processes of a group.
        process: this process.
        here: the number of replicas of each process.
    """

    groups: tuple[tuple[int, ...], ...]
    process: int = 0
    here: int = 1

    @property
    def several(self) -> bool:
        """Whether there are several groups, so that several replicas hold the same part."""
        return len(self.groups) > 1

    @property
    def number(self) -> int:
        """The number of this process' group, from 0."""
        return next(number for number, group in enumerate(self.groups) if self.process in group)

    @property
    def own(self) -> tuple[int, ...]:
        """The processes of this process' group."""
        return self.groups[self.number]

    @property
    def counterparts(self) -> tuple[int, ...]:
        """The processes that hold the same parts as this one, by group."""
        place = self.own.index(self.process)
        return tuple(group[place] for group in self.groups)

    @property
    def parts(self) -> int:
        """The number of parts of a weight."""
        return len(self.own) * self.here

    @property
    def places(self) -> range:
        """The numbers of the parts that the replicas of this process hold."""
        first = self.own.index(self.process) * self.here
        return range(first, first + self.here)

    def bounds(self, rows: WeightRows) -> list[tuple[int, int]]:
        """The first entry that each replica of this process holds, and the one behind its last."""
        return rows.bounds(self.parts)[self.places.start : self.places.stop]

    def bounds_of_processes(self, rows: WeightRows) -> list[tuple[int, int]]:
        """The first entry that each process of the job holds, and the one behind its last."""
        processes = range(len(self.groups) * len(self.own))
        of_replicas = [dataclasses.replace(self, process=process).bounds(rows) for process in processes]
        return [(bounds[0][0], bounds[-1][1]) for bounds in of_replicas]

    def of_processes(self, rows: WeightRows) -> list[int]:
        """How many entries each process of a group holds."""
        sizes = rows.of_replicas(self.parts)
        return [sum(sizes[place : place + self.here]) for place in range(0, self.parts, self.here)]
