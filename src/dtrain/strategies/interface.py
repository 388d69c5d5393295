"""The public interface of a strategy for type checkers: TensorFlow itself has no type annotations.

All strategies of dtrain and TensorFlow have these methods. Nothing is checked at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class DistributionStrategy(Protocol):
    """The public interface of `tf.distribute.Strategy`; see TensorFlow's documentation for details."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers together."""

    @property
    def cluster_resolver(self) -> Any:
        """The `ClusterResolver` that describes the cluster to TensorFlow, or None."""

    @property
    def extended(self) -> Any:
        """The `tf.distribute.StrategyExtended` with TensorFlow's further methods."""

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which models, optimizers and metrics must be created."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        options: Any = ...,
    ) -> Any:
        """Calls a function on every replica."""

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Reduces the values of all replicas to one value."""

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the values of all replicas along an axis."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = ...) -> Any:
        """Divides the batches of a dataset between the replicas."""

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any = ...) -> Any:
        """Makes a dataset for each worker by a function of an `InputContext`."""

    def experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        """Makes a value for each replica by a function of a `ValueContext`."""

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas, as a tuple."""
