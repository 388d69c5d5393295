"""What a program may call on a strategy, for type checkers: TensorFlow itself has no types.

Every strategy of dtrain's and of TensorFlow's has these; nothing is checked when a program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class DistributionStrategy(Protocol):
    """The public face of `tf.distribute.Strategy`, whose documentation holds."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas over all workers."""

    @property
    def cluster_resolver(self) -> Any:
        """What tells TensorFlow of the cluster, or None."""

    @property
    def extended(self) -> Any:
        """TensorFlow's further methods."""

    def scope(self) -> AbstractContextManager[Any]:
        """Where models, optimizers and metrics are made."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        options: Any = ...,
    ) -> Any:
        """Calls a function on every replica."""

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """One value of those of all replicas."""

    def gather(self, value: Any, axis: int) -> Any:
        """The values of all replicas, one after the other."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = ...) -> Any:
        """Divides the batches of a dataset."""

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any = ...) -> Any:
        """Makes a dataset for each worker."""

    def experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        """A value for each replica."""

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process' replicas."""
