"""The interface between the engine and strategies or datasets, so that the engine names none of them.

A strategy of dtrain's has an attribute `dtrain_layout`: a `ReplicaLayout`, or a `ServerLayout` if its weights
are on parameter servers. A strategy without it is left to Keras and TensorFlow. A dataset may carry its own
way to read one worker's part of its batches, or to begin at a position. No strategy is implemented here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dtrain.keras_engine.gradient_hook import GradientHook


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
    """

    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    central: bool = False
    sums: str = ""
    gradient_hook: GradientHook | None = None

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
    """A function that returns the seconds that this process has waited for other workers so far.

    None for a strategy whose transport does not measure them.
    """
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


def current_layout() -> ReplicaLayout | None:
    """The layout of the current strategy, if it is dtrain's and has several replicas; else None."""
    import tensorflow as tf

    layout = layout_of(tf.distribute.get_strategy())
    return layout if layout is not None and layout.replicas > 1 else None


def in_replica() -> bool:
    """Whether the code runs in a replica context of a strategy of dtrain's that has several replicas."""
    import tensorflow as tf

    return current_layout() is not None and tf.distribute.get_replica_context() is not None


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """What the engine needs to know of a strategy whose weights are on parameter servers.

    Attributes:
        workers: the number of tasks that compute steps.
        max_staleness: the most updates that may come between a step's read and its write; None for no bound.
        servers: the servers' lock and clock, an `asynchronous.exchange.Servers`.
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


def own_split(dataset: Any, layout: ReplicaLayout) -> Any | None:
    """A dataset of this worker's part of each batch, if the source dataset can read it; else None.

    A `tf.data.Dataset` may have an attribute `dtrain_split`, a function `layout -> tf.data.Dataset | None`.
    It returns a dataset of `(parts, total)`: a batch for each local replica, and the number of rows of the
    global batch (an int32 scalar). The dataset has the same number of elements on every worker; a part may
    have no rows. None means that global batches are read and cut. Every worker must call it.

    Args:
        dataset: the dataset that `fit` was given.
        layout: how the replicas are distributed; with one worker the result is None.
    """
    split = getattr(dataset, "dtrain_split", None)
    return None if split is None or layout.workers == 1 else split(layout)


def datasets_in_place(arguments: dict[str, Any], used_by: str) -> bool:
    """Replaces objects that make a dataset (by a method `dtrain_dataset`) with the dataset, in place.

    Args:
        arguments: of `fit`, `evaluate` or `predict`, by name.
        used_by: the name of that method.

    Returns:
        Whether anything was replaced.
    """
    found = False
    for name in ("x", "validation_data"):
        make = getattr(type(arguments.get(name)), "dtrain_dataset", None)
        if make is not None:
            arguments[name] = make(arguments[name], "evaluate" if name == "validation_data" else used_by)
            found = True
    return found


class Positions(Protocol):
    """The interface of the attribute `dtrain_positions` of a dataset that can begin at any batch.

    Attributes:
        epoch: the number of the epoch that the next iteration over the dataset yields.
        fingerprint: the facts that decide the order of the dataset, by their names in messages.
    """

    @property
    def epoch(self) -> int:  # noqa: D102
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:  # noqa: D102
        ...

    def seek(self, epoch: int) -> None:
        """Makes the next iteration over the dataset yield this epoch."""

    def rest(self, epoch: int, step: int) -> Any:
        """A dataset of the epoch's batches from a step to the end of the epoch."""


def own_positions(dataset: Any) -> Positions | None:
    """A dataset's `Positions`, or None; a dataset that is derived from it, as by `map`, has none."""
    return getattr(dataset, "dtrain_positions", None)
