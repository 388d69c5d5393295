"""Divides the global batches of a source among the replicas of a strategy.

Which batches there are is decided by the source, and how rows are split in `input.py`, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.feed.arrays import ArraySource
from dtrain.keras_engine.feed.sources import Source
from dtrain.keras_engine.input import SplitDataset, WholeDataset
from dtrain.keras_engine.input_advice import counts_for_sure
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of
from dtrain.keras_engine.talk import exchange
from dtrain.upstream import tensorflow as upstream_tf

_OWN_POLICIES = (tf.data.experimental.AutoShardPolicy.FILE, tf.data.experimental.AutoShardPolicy.OFF)


def divided(dataset: Any, source: Source, strategy: Any, grouped: Callable[[Any], Any]) -> Any:
    """The iterable over a dataset's global batches, divided among the replicas of a strategy.

    Args:
        dataset: the source's dataset, or the rest of one of its passes.
        source: the source of the dataset.
        strategy: the model's strategy.
        grouped: returns an iterator over groups of batches for a single replica, or None.

    Returns:
        A `WholeDataset` with one replica, a `SplitDataset` with several, or a
        `tf.distribute.DistributedDataset` if TensorFlow divides the dataset.
    """
    layout = layout_of(strategy)
    if layout is None or _divided_by_tensorflow(dataset, layout):
        given = isinstance(dataset, tf.distribute.DistributedDataset)
        return dataset if given else strategy.experimental_distribute_dataset(dataset)
    exact = source.counted or counts_for_sure(dataset)
    arrays = isinstance(source, ArraySource) and dataset is source.dataset
    own = source.passes(layout) if isinstance(source, ArraySource) and arrays else None
    if layout.replicas == 1:
        return WholeDataset(dataset, exact=exact, own=own, grouped=grouped)
    return SplitDataset(dataset, layout, exact=exact, own=own)


def _divided_by_tensorflow(dataset: Any, layout: ReplicaLayout) -> bool:
    """Whether TensorFlow has divided a dataset, or its options ask for a division by files or by the user."""
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return True
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return layout.workers > 1 and policy in _OWN_POLICIES


def check_same_data(dataset: Any, steps: int | None, layout: ReplicaLayout) -> None:
    """Refuses data that differ between workers, if each worker takes its part of the same global batches.

    Every worker must call it.

    Args:
        dataset: this worker's dataset.
        steps: `steps_per_epoch`, or None.
        layout: how the replicas are distributed.

    Raises:
        DataError: the data differ; it is raised on every worker and names what differs.
    """
    if layout.workers == 1 or _divided_by_tensorflow(dataset, layout):
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
    """The steps of a distributed dataset until the longest worker's data end; None if not known.

    Every worker must call it.

    Args:
        dataset: a `tf.distribute.DistributedDataset`.
        layout: how the replicas are distributed.
    """
    own = int(dataset.cardinality)
    if own >= 0 and upstream_tf.yields_replica_batches(dataset):
        own = -(-own // layout.local_replicas)
    counts = exchange(layout, own)
    return None if min(counts) < 0 else max(counts)


class CountedAdapter:
    """A data adapter with a number of batches that all workers agree on."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)
