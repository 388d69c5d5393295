"""Chooses the source of global batches for given data.

Whether all workers have the same data is checked in `same_examples.py`. The sources of datasets are in
`dataset_sources.py`, that of arrays in `arrays.py`, that of a `PyDataset` in `py_datasets.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from dtrain.engine.feed.arrays import ArraySource
from dtrain.engine.feed.dataset_sources import PipelineSource, ReplayedSource
from dtrain.engine.feed.input_advice import counts_for_sure
from dtrain.engine.feed.position import DataPosition
from dtrain.engine.feed.py_datasets import PyDatasetSource, can_be_opened
from dtrain.engine.feed.split_datasets import SplitDataset
from dtrain.interfaces.dataset_parts import own_positions
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_adapters
from dtrain.upstream import tf_data as upstream_datasets


def is_dataset(original: Callable[[Any], bool], x: Any) -> bool:
    """The replacement of the function by which older versions of Keras recognise a TensorFlow dataset."""
    return original(x) or isinstance(x, tf.distribute.DistributedDataset)


class Source(Protocol):
    """The global batches of one `fit`, in passes over the data.

    Attributes:
        kind: the kind of data, for messages.
        counted: whether the number of batches that Keras knows is certain.
        dataset: a dataset of global batches, or a distributed dataset; each iteration over it is a pass.
        fingerprint: the facts about the data that a position depends on, by their names in messages.
    """

    kind: str
    counted: bool
    dataset: Any

    @property
    def fingerprint(self) -> dict[str, Any]:  # noqa: D102
        ...

    def start(self) -> None:
        """Called when the first epoch begins; not called if a position was opened before."""

    def begin(self, number: int) -> None:
        """Called before an iterator is made, for pass `number` from its first batch; it may stay unread."""

    def state(self) -> dict[str, Any]:
        """The state that decides the order of the data, as plain data for a checkpoint."""

    def open(
        self, position: DataPosition, state: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Any | None]:
        """Opens a position, as a context.

        The context's value is a dataset whose next iteration is the rest of the running pass; its iterator
        must be made within the context. The value is None if the source must be read again from its
        beginning. `dataset` may be replaced.

        Args:
            position: the position to resume at.
            state: what `state` returned at that position.
        """


def source_of(adapter: Any, steps_per_epoch: int | None, layout: ReplicaLayout | None) -> Source:
    """The source for the data of a Keras data adapter.

    Args:
        adapter: Keras' data adapter.
        steps_per_epoch: the argument of `fit`, or None.
        layout: how the replicas are distributed; None under TensorFlow's own strategies.
    """
    if keras_adapters.is_arrays(adapter):
        return ArraySource(adapter, layout)
    if keras_adapters.is_py_dataset(adapter) and can_be_opened(adapter, steps_per_epoch):
        return PyDatasetSource(adapter, layout)
    dataset = adapter.get_tf_dataset()
    positions = own_positions(dataset)
    if positions is not None:
        return PipelineSource(dataset, positions)
    return ReplayedSource(keras_adapters.kind_of(adapter), dataset, 1 if layout is None else layout.replicas)


def divided(
    dataset: Any,
    source: Source,
    strategy: Any,
    grouped: Callable[[Any], Any],
    layout: ReplicaLayout | None,
) -> Any:
    """The iterable over a dataset's global batches, divided among the replicas of a strategy.

    Args:
        dataset: the source's dataset, or the rest of one of its passes.
        source: the source of the dataset.
        strategy: the model's strategy.
        grouped: returns an iterator over groups of batches for a single replica, or None.
        layout: how the replicas are distributed that divide the batches.

    Returns:
        A `SplitDataset`, or a `tf.distribute.DistributedDataset` if TensorFlow divides the dataset.
    """
    own = None
    if isinstance(source, ArraySource) and dataset is source.dataset:
        own = None if layout is None else source.passes(layout)
        dataset = dataset.made if own is None else dataset
    if layout is None or divided_by_tensorflow(dataset, layout):
        given = isinstance(dataset, tf.distribute.DistributedDataset)
        return dataset if given else strategy.experimental_distribute_dataset(dataset)
    exact = source.counted or counts_for_sure(dataset)
    filled = isinstance(source, ArraySource) and source.least_rows >= layout.replicas
    return SplitDataset(dataset, layout, exact=exact, filled=filled, own=own, grouped=grouped)


def divided_by_tensorflow(dataset: Any, layout: ReplicaLayout) -> bool:
    """Whether TensorFlow has divided a dataset, or its options ask for a division by files.

    Under OFF, as TensorFlow reads it, every worker would train on all examples, as often as there are
    replicas. It is most often set to silence a warning.
    """
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return True
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return layout.workers > 1 and policy == tf.data.experimental.AutoShardPolicy.FILE


def common_steps(dataset: Any, layout: ReplicaLayout) -> int | None:
    """The steps of a distributed dataset until the longest worker's data end; None if not known.

    Every worker must call it.

    Args:
        dataset: a `tf.distribute.DistributedDataset`.
        layout: how the replicas are distributed.
    """
    own = int(dataset.cardinality)
    if own >= 0 and upstream_datasets.yields_replica_batches(dataset):
        own = -(-own // layout.local_replicas)
    counts = exchange(layout, own, what="the number of batches")
    return None if min(counts) < 0 else max(counts)


class CountedAdapter:
    """A data adapter with a number of batches that all workers agree on."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)
