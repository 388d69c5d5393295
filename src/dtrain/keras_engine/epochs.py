"""Hands `fit` the epochs of any input that Keras takes, split over the replicas, from any place on.

Which batches there are is Keras' adapters' business; here they are only divided. How a source finds a place
is `positions.py`'s and the sources'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.array_order import ArraySource
from dtrain.keras_engine.asynchronous.functions import make_asynchronous_epochs
from dtrain.keras_engine.between_steps import announce
from dtrain.keras_engine.blocks import Blocks, every_batch_wished, plan_wished
from dtrain.keras_engine.groups import Groups, batch_size_of, can_be_grouped
from dtrain.keras_engine.input import SplitDataset, WholeDataset
from dtrain.keras_engine.input_advice import counts_for_sure, may_read_ahead
from dtrain.keras_engine.passes import Passes
from dtrain.keras_engine.placed_epochs import PlacedEpochs
from dtrain.keras_engine.positions import ReadSource, Source, placed
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of, servers_of
from dtrain.keras_engine.py_dataset_order import PyDatasetSource, can_be_computed
from dtrain.keras_engine.step_function import StepFunction
from dtrain.keras_engine.talk import exchange
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import makes

_OWN_POLICIES = (tf.data.experimental.AutoShardPolicy.FILE, tf.data.experimental.AutoShardPolicy.OFF)


@makes(upstream_keras.EPOCH_ITERATOR)
def make_epoch_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of the trainer's epoch iterator class."""

    base: Any = original

    class EpochIterator(PlacedEpochs, base):  # type: ignore[misc]
        """Keras' epochs; under a strategy of dtrain's, over batches that are split by it.

        Attributes:
            element_spec: of a global batch.
        """

        def __new__(cls, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls if servers_of(distribute_strategy) is None else asynchronous)

        def __init__(self, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
            upstream_keras.epoch_iterator_base().__init__(self, *args, **kwargs)
            self.data_adapter: Any
            self._distribute_strategy = distribute_strategy
            layout = layout_of(distribute_strategy)
            self._blocks = Blocks(
                layout or ReplicaLayout(), every_batch=layout is None or every_batch_wished()
            )
            self._plan = plan_wished()
            self._groups: Groups | None = None
            self._in_xla: bool | None = None  # as it is decided where the first batch is read
            self._source = _source_of(self.data_adapter, self.steps_per_epoch, layout)
            self.element_spec = self._source.dataset.element_spec
            self._fingerprint = self._source.fingerprint | {
                "the kind of data": self._source.kind,
                "the number of batches": self._num_batches,
                "steps_per_epoch": self.steps_per_epoch,
                "shapes and types": str(self.element_spec),
            }
            self._distributed_dataset = self._divided(self._source.dataset, check=True)
            self._forget()
            announce(self)

        def _divided(self, dataset: Any, *, check: bool = False) -> Any:
            """What is iterated over for a dataset of global batches."""
            strategy, layout = self._distribute_strategy, layout_of(self._distribute_strategy)
            if layout is None:
                given = isinstance(dataset, tf.distribute.DistributedDataset)
                return dataset if given else strategy.experimental_distribute_dataset(dataset)
            if layout.replicas == 1 and isinstance(dataset, tf.data.Dataset):
                return WholeDataset(
                    dataset,
                    exact=self._exact(dataset),
                    own=self._read_apart(dataset, layout),
                    grouped=self._grouped,
                )
            if layout.replicas > 1 and not isinstance(dataset, tf.distribute.DistributedDataset):
                if layout.workers == 1 or _policy(dataset) not in _OWN_POLICIES:
                    if check:
                        check_same_data(dataset, self.steps_per_epoch, layout)
                    own = self._read_apart(dataset, layout)
                    return SplitDataset(dataset, layout, exact=self._exact(dataset), own=own)
                dataset = strategy.experimental_distribute_dataset(dataset)
            if isinstance(dataset, tf.distribute.DistributedDataset) and check:
                self.data_adapter = _Counted(self.data_adapter, common_steps(dataset, layout))
                self._num_batches = self.data_adapter.num_batches
            return dataset

        def _read_apart(self, dataset: Any, layout: ReplicaLayout) -> Passes | None:
            """What reads this process' part alone; None where there is no such."""
            source = self._source
            if isinstance(source, ArraySource) and dataset is source.dataset:
                return source.passes(layout)
            return None

        def _exact(self, dataset: Any) -> bool:
            return self._source.counted or counts_for_sure(dataset)

        def _grouped(self, dataset: Any) -> Any:
            """Groups of batches where the model trains in XLA; None elsewhere."""
            plan, each = self._plan, self.steps_per_epoch or self._num_batches
            if plan is None or self.steps_per_execution > 1:
                return None
            function = plan.model.train_function
            if not isinstance(function, StepFunction):
                return None
            if self._in_xla is None:
                readable = isinstance(self._source, ArraySource) or may_read_ahead(dataset)
                known = each and readable and can_be_grouped(dataset.element_spec)
                steps = each * plan.epochs if each and known else None
                self._in_xla = function.in_xla(steps, batch_size_of(self._source, dataset))
            if not self._in_xla:
                return None
            if self._groups is None or self._groups.dataset is not dataset:
                self._groups = Groups(self._source, dataset, one_by_one=self._blocks.every_batch)
            return iter(self._groups)

    asynchronous = make_asynchronous_epochs(EpochIterator)
    EpochIterator.__name__ = original.__name__
    EpochIterator.__qualname__ = original.__qualname__
    return EpochIterator


def _source_of(adapter: Any, steps_per_epoch: int | None, layout: ReplicaLayout | None) -> Source:
    """Where the batches of an adapter of Keras' come from."""
    if upstream_data.is_arrays(adapter):
        return ArraySource(adapter, layout)
    if upstream_data.is_py_dataset(adapter) and can_be_computed(adapter, steps_per_epoch):
        return PyDatasetSource(adapter, layout)
    dataset = adapter.get_tf_dataset()
    replicas = 1 if layout is None else layout.replicas
    return placed(dataset) or ReadSource(upstream_data.kind_of(adapter), dataset, replicas)


class _Counted:
    """A data adapter with a number of batches that all workers agree on."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def check_same_data(dataset: tf.data.Dataset, steps: int | None, layout: ReplicaLayout) -> None:
    """Refuses data that differ by worker, where every worker is to take its part of the same batches.

    Every worker must call it.

    Raises:
        DataError: saying on every worker what differs.
    """
    if layout.workers == 1:
        return
    mine = {
        "the number of batches": int(dataset.cardinality()),
        "steps per epoch": steps,
        "shapes and types": str(dataset.element_spec),
        "the seed of TensorFlow's random numbers": upstream_tf.global_seed(),
    }
    everyone = exchange(layout, mine)
    for what in mine:
        found = [theirs[what] for theirs in everyone]
        if any(value != found[0] for value in found):
            each = "; ".join(f"worker {worker}: {value}" for worker, value in enumerate(found))
            raise DataError(
                f"The workers' data differ in {what} ({each}), but each takes its part of the same batches.",
                hint=(
                    "give every worker the same dataset and the same seed, unsharded; data sharded by "
                    "worker already go through strategy.distribute_datasets_from_function"
                ),
            )


def common_steps(dataset: Any, layout: ReplicaLayout) -> int | None:
    """How many steps a distributed dataset gives until the last worker's data ends; None if not known.

    Every worker must call it.

    Args:
        dataset: a `tf.distribute.DistributedDataset`.
        layout: the strategy's.
    """
    own = int(dataset.cardinality)
    if own >= 0 and upstream_tf.yields_replica_batches(dataset):
        own = -(-own // layout.local_replicas)
    counts = exchange(layout, own)
    return None if min(counts) < 0 else max(counts)


def _policy(dataset: tf.data.Dataset) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy
