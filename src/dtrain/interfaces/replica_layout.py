"""How the replicas of a strategy are distributed over workers, or its weights over parameter servers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtrain.partition.shard_groups import ShardGroups

if TYPE_CHECKING:
    from dtrain.interfaces.gradient_hook import GradientHook


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """How the replicas of a strategy are distributed over workers.

    Attributes:
        workers: the number of processes that train together.
        worker: this process' number among them, from 0.
        local_replicas: the number of replicas in this process.
        central: whether weights and optimizer state exist once for all replicas.
        shard_groups: which workers divide the weights and the optimizer's state among them
            (`divided_weights.py`); None if each replica holds whole weights.
        sums: names what all-reduces between workers (`Transport.sums`). Results of different ones may differ
            in their last bits. "" with one worker.
        overlap: whether workers communicate while they compute. No bit depends on it.
        gradient_hook: changes how gradients are reduced; None for a plain all-reduce.
        cross_device_sums: whether the strategy's `CrossDeviceOps` make the sums of a step.
        members: the number of processes that train apart, each as the only worker of its strategy, and meet
            in the rounds of a quorum; 1 without a quorum.
        member: this process' number among them, from 0.
        apart: whether this layout only says which rows of the data are read here: its workers exchange
            nothing, because they come and go.
    """

    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    central: bool = False
    shard_groups: ShardGroups | None = None
    sums: str = ""
    overlap: bool = False
    gradient_hook: GradientHook | None = None
    cross_device_sums: bool = False
    members: int = 1
    member: int = 0
    apart: bool = False

    @property
    def replicas(self) -> int:
        """The number of all replicas of the job."""
        return self.workers * self.local_replicas

    @property
    def leads(self) -> bool:
        """Whether this process is the first one of the job, which shows what all have in common."""
        return self.worker == self.member == 0

    @property
    def divided(self) -> bool:
        """Whether each replica holds a part of the weights and of the optimizer's state."""
        return self.shard_groups is not None

    @property
    def average_every(self) -> int:
        """Steps after which the replicas average their weights (local SGD); 0 if they reduce gradients.

        One replica has nothing to average, but takes the outer steps of DiLoCo.
        """
        hook = self.gradient_hook
        alone = hook is not None and self.replicas * self.members == 1 and hook.outer is None
        return 0 if hook is None or alone else hook.average_every

    @property
    def reading(self) -> ReplicaLayout:
        """The layout by which training data are divided: the members of a quorum divide each batch."""
        if self.members == 1:
            return self
        return dataclasses.replace(
            self, workers=self.members, worker=self.member, members=1, member=0, apart=True
        )

    @property
    def first_replica(self) -> int:
        """The global number of this process' first replica."""
        return self.worker * self.local_replicas


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """What the engine needs to know of a strategy whose weights are on parameter servers.

    Attributes:
        workers: the number of tasks that compute steps.
        max_staleness: the most updates that may come between a step's read and its write; None for no bound.
        servers: the servers' lock and clock, an `engine.parameter_server.exchange.Servers`.
        overlap: whether a step computes while the previous step's update is still being sent.
        gradient_hook: changes how gradients are sent; None to send them as they are.
    """

    workers: int
    max_staleness: int | None
    servers: Any
    overlap: bool = False
    gradient_hook: GradientHook | None = None

    @property
    def most_of_others(self) -> int | None:
        """The most updates of other workers that a step may miss; None for no bound.

        With overlap, one of the missed updates is its own worker's.
        """
        return self.max_staleness - self.overlap if self.max_staleness is not None else None
