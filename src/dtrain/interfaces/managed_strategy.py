"""What the engine knows of a strategy: one object for each, so that the engine names no strategy.

A strategy of dtrain's has it as attribute `dtrain_managed`. Strategies without it are left to Keras and
TensorFlow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dtrain.interfaces.replica_layout import ReplicaLayout, ServerLayout


class AsynchronousEngine(Protocol):
    """How models train whose weights are on parameter servers: what the engine calls of it."""

    def prepare_fit(self, arguments: dict[str, Any], callbacks: list[Any]) -> list[Any]:
        """Changes the arguments of `fit` in place, and returns the callbacks that it gets."""

    def prepare_without_training(self, arguments: dict[str, Any]) -> None:
        """Changes the arguments of `evaluate` or `predict` in place."""

    def step_function(self, model: Any, *, training: bool) -> Any:
        """The function that `fit` or `evaluate` calls for each step."""

    def predict_function(self, model: Any) -> Any:
        """The function that `predict` calls for each batch."""

    def epochs(self, base: type) -> type:
        """The class of epoch iterators, derived from that of the synchronous engine."""

    def snapshots(self, model: Any) -> Snapshots:
        """What reads all variables of a model at one moment."""

    def update(self, optimizer: Any, apply: Callable[[], Any]) -> None:
        """Applies an update of a user's own loop as one: no other update is applied in between."""


class Snapshots(Protocol):
    """Reads all variables of a model at one moment."""

    def one(self) -> contextlib.AbstractContextManager[None]:
        """Takes a snapshot; inside the context, the Keras variables have its values."""


def _at_once(tensors: Sequence[Any]) -> Sequence[Sequence[int]]:
    return [range(len(tensors))]


@dataclass(frozen=True, kw_only=True)
class ManagedStrategy:
    """What the engine knows of a strategy.

    Attributes:
        layout: how the replicas are distributed, or the servers; None for a strategy that is not dtrain's.
        calls: the collective calls of several workers (`collectives.graph_calls.CallOperations`); None for
            one process, and where TensorFlow's collectives serve.
        reduction_groups: which dense tensors one call all-reduces together, in the order of the calls. With
            more than one group, gradients are sent while others are still computed.
        asynchronous: the engine of parameter servers; None for a synchronous strategy.
        quorum: this worker's connection to the rounds of a job with a quorum
            (`process_group.quorum_client.QuorumClient`); None in other jobs.
    """

    layout: ReplicaLayout | ServerLayout | None
    calls: Any = None
    reduction_groups: Callable[[Sequence[Any]], Sequence[Sequence[int]]] = _at_once
    asynchronous: AsynchronousEngine | None = None
    quorum: Any = None

    @property
    def waited(self) -> Callable[[], float] | None:
        """A function: the seconds that this process has waited for others so far; None if not measured."""
        return None if self.calls is None else self.calls.waited

    @property
    def communicated(self) -> Callable[[], float] | None:
        """A function: the seconds of this process' communication so far, including the waiting.

        None for a strategy whose transport does not measure them.
        """
        return None if self.calls is None else self.calls.communicated


_NOT_MANAGED = ManagedStrategy(layout=None)


def managed(strategy: Any) -> ManagedStrategy:
    """What the engine knows of a strategy; without a layout if the strategy is not dtrain's."""
    found: ManagedStrategy = getattr(strategy, "dtrain_managed", _NOT_MANAGED)
    return found


def is_managed(strategy: Any) -> bool:
    """Whether the engine trains the models of a strategy; if not, they are left to Keras and TensorFlow."""
    return managed(strategy).layout is not None


def layout_of(strategy: Any) -> ReplicaLayout | None:
    """A strategy's replica layout; None for TensorFlow's strategies, parameter servers and TPUs."""
    layout = managed(strategy).layout
    return layout if isinstance(layout, ReplicaLayout) else None


def current_layout() -> ReplicaLayout | None:
    """The layout of the current strategy, if it is dtrain's and has several replicas; else None."""
    import tensorflow as tf  # late: processes that only exchange small values need no TensorFlow

    layout = layout_of(tf.distribute.get_strategy())
    return layout if layout is not None and layout.replicas > 1 else None
