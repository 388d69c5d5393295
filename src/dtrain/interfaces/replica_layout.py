"""What a strategy tells the engine of its replicas, so that the engine names no strategy.

A strategy of dtrain's has an attribute `dtrain_layout`: a `ReplicaLayout`, or a `ServerLayout` if its weights
are on parameter servers. A strategy without it is left to Keras and TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        sums: names what all-reduces between workers (`Transport.sums`). Results of different ones may differ
            in their last bits. "" with one worker.
        gradient_hook: changes how gradients are reduced; None for a plain all-reduce.
        cross_device_sums: whether the strategy's `CrossDeviceOps` make the sums of a step.
    """

    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    central: bool = False
    sums: str = ""
    gradient_hook: GradientHook | None = None
    cross_device_sums: bool = False

    @property
    def replicas(self) -> int:
        """The number of all replicas of the job."""
        return self.workers * self.local_replicas

    @property
    def average_every(self) -> int:
        """Steps after which the replicas average their weights (local SGD); 0 if they reduce gradients."""
        hook = self.gradient_hook
        return 0 if hook is None or self.replicas == 1 else hook.average_every

    @property
    def first_replica(self) -> int:
        """The global number of this process' first replica."""
        return self.worker * self.local_replicas


def is_managed(strategy: Any) -> bool:
    """Whether the engine trains the models of a strategy; if not, they are left to Keras and TensorFlow."""
    return getattr(strategy, "dtrain_layout", None) is not None


def is_asynchronous(strategy: Any) -> bool:
    """Whether a strategy's weights are on parameter servers, so that it has a `ServerLayout`."""
    return isinstance(getattr(strategy, "dtrain_layout", None), ServerLayout)


def layout_of(strategy: Any) -> ReplicaLayout | None:
    """A strategy's replica layout; None for TensorFlow's strategies, parameter servers and TPUs."""
    layout = getattr(strategy, "dtrain_layout", None)
    return layout if isinstance(layout, ReplicaLayout) else None


def waiting_clock(strategy: Any) -> Callable[[], float] | None:
    """A function: the seconds that this process has waited for others so far; None if not measured."""
    return getattr(strategy, "dtrain_waited", None)


def communication_clock(strategy: Any) -> Callable[[], float] | None:
    """A function that returns the seconds of this process' communication so far, including the waiting.

    None for a strategy whose transport does not measure them.
    """
    return getattr(strategy, "dtrain_communicated", None)


def reduction_groups(strategy: Any, tensors: Sequence[Any]) -> Sequence[Sequence[int]]:
    """Which dense tensors one call of the transport all-reduces together, in the order of the calls.

    All together, unless the strategy sends gradients while others are still computed (`dtrain_buckets`).
    """
    groups = getattr(strategy, "dtrain_buckets", None)
    return [range(len(tensors))] if groups is None else groups(tensors)


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


def current_layout() -> ReplicaLayout | None:
    """The layout of the current strategy, if it is dtrain's and has several replicas; else None."""
    import tensorflow as tf  # late: processes that only exchange small values need no TensorFlow

    layout = layout_of(tf.distribute.get_strategy())
    return layout if layout is not None and layout.replicas > 1 else None
