"""What the engine asks of a strategy, so that it need not know which strategies there are.

A strategy of dtrain's carries a `ReplicaLayout`; a strategy without one is TensorFlow's own and is left
alone. A dataset may carry a way to read one worker's part of its batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """How the replicas of a strategy are spread.

    Attributes:
        workers: processes that train together.
        worker: this process' number among them.
        local_replicas: replicas in this process.
        central: whether weights and optimizer state exist once for all replicas.
        sums: what adds up over the workers; another may give other last bits. "" where nobody needs to know.
    """

    workers: int = 1
    worker: int = 0
    local_replicas: int = 1
    central: bool = False
    sums: str = ""

    @property
    def replicas(self) -> int:
        """All replicas of the job."""
        return self.workers * self.local_replicas

    @property
    def first_replica(self) -> int:
        """The global number of this process' first replica."""
        return self.worker * self.local_replicas


def layout_of(strategy: Any) -> ReplicaLayout | None:
    """The layout of one of dtrain's strategies; None for TensorFlow's own."""
    return getattr(strategy, "dtrain_layout", None)


def waiting_clock(strategy: Any) -> Callable[[], float] | None:
    """What gives the seconds that this process has waited for other workers so far.

    None for a strategy whose transport does not know them.
    """
    return getattr(strategy, "dtrain_waited", None)


def communication_clock(strategy: Any) -> Callable[[], float] | None:
    """What gives the seconds that this process has spent on other workers so far, the waiting included.

    None for a strategy whose transport does not know them.
    """
    return getattr(strategy, "dtrain_communicated", None)


def current_layout() -> ReplicaLayout | None:
    """The layout of the strategy that is in force here, if it is dtrain's and has several replicas."""
    import tensorflow as tf

    layout = layout_of(tf.distribute.get_strategy())
    return layout if layout is not None and layout.replicas > 1 else None


def in_replica() -> bool:
    """Whether this code runs for one replica of several under a strategy of dtrain's."""
    import tensorflow as tf

    return current_layout() is not None and tf.distribute.get_replica_context() is not None


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """What the engine asks of a strategy whose weights are on parameter servers.

    Attributes:
        workers: tasks that compute steps.
        max_staleness: the bound of updates between a step's read and its write, or None.
        servers: the lock and the clock, an `asynchronous.exchange.Servers`.
        overlap: whether a step computes while what the one before it sent is on its way.
    """

    workers: int
    max_staleness: int | None
    servers: Any
    overlap: bool = False

    @property
    def most_of_others(self) -> int | None:
        """How many updates of other workers a step may miss: with overlap one place is its own worker's."""
        return self.max_staleness - self.overlap if self.max_staleness is not None else None


def servers_of(strategy: Any) -> ServerLayout | None:
    """The server layout of dtrain's parameter-server strategy; None for every other strategy."""
    return getattr(strategy, "dtrain_servers", None)


def own_split(dataset: Any, layout: ReplicaLayout) -> Any | None:
    """This worker's part of a dataset's batches, read by the dataset's own way, if it has one.

    A `tf.data.Dataset` whose attribute `dtrain_split` is a function `layout -> tf.data.Dataset | None` is
    asked for a dataset of `(parts, total)`: a batch for each local replica, and the rows of the whole batch
    (an int32 scalar). It has equally many elements for every worker; a part may have no rows. None says that
    the whole batches are to be cut. Every worker must call it.

    Args:
        dataset: what `fit` was given.
        layout: how the replicas are spread; with one worker nobody else reads, so there is nothing to split.
    """
    split = getattr(dataset, "dtrain_split", None)
    return None if split is None or layout.workers == 1 else split(layout)


def datasets_in_place(arguments: dict[str, Any], used_by: str) -> bool:
    """Puts datasets in the place of what makes them (`dtrain_dataset`), and says whether there was any.

    Args:
        arguments: of `fit`, `evaluate` or `predict`, by name.
        used_by: which of them.
    """
    found = False
    for name in ("x", "validation_data"):
        make = getattr(type(arguments.get(name)), "dtrain_dataset", None)
        if make is not None:
            arguments[name] = make(arguments[name], "evaluate" if name == "validation_data" else used_by)
            found = True
    return found


class Positions(Protocol):
    """What a dataset that can begin at any batch carries as its attribute `dtrain_positions`.

    Attributes:
        epoch: the number of the epoch that the next iteration over the dataset is.
        fingerprint: what decides its order, by its name in messages.
    """

    @property
    def epoch(self) -> int:  # noqa: D102
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:  # noqa: D102
        ...

    def seek(self, epoch: int) -> None:
        """Has the next iteration over the dataset be this epoch."""

    def rest(self, epoch: int, step: int) -> Any:
        """A dataset of the epoch's batches from a step on, and no more."""


def own_positions(dataset: Any) -> Positions | None:
    """How a dataset begins at a position, if it can; datasets that are made of it cannot."""
    return getattr(dataset, "dtrain_positions", None)
