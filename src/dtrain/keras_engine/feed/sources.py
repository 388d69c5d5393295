"""Sources of global batches: their interface, which one reads given data, and their division over replicas.

The sources for datasets are here: that of a `Pipeline`, and that of any other. The source for arrays is in
`arrays.py`, the one for a `PyDataset` in `py_datasets.py`. How the rows of a batch are split is decided in
`splitting.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.feed.arrays import ArraySource
from dtrain.keras_engine.feed.iterators import SplitDataset
from dtrain.keras_engine.feed.position import DataPosition
from dtrain.keras_engine.feed.py_datasets import PyDatasetSource, can_be_opened
from dtrain.keras_engine.input_advice import counts_for_sure, tuned
from dtrain.keras_engine.peer_exchange import exchange
from dtrain.keras_engine.protocol import Positions, ReplicaLayout, layout_of, own_positions
from dtrain.log import logger
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import keras_names
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import replaces

_OWN_POLICIES = (tf.data.experimental.AutoShardPolicy.FILE, tf.data.experimental.AutoShardPolicy.OFF)


@replaces(keras_names.IS_DATASET)
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


class PipelineSource:
    """The source for a dataset that can begin at any batch, such as that of a `Pipeline`.

    Args:
        dataset: the dataset that `fit` was given.
        positions: the dataset's `Positions`.
    """

    kind = "dtrain.data"
    counted = False

    def __init__(self, dataset: Any, positions: Positions) -> None:
        self.dataset = dataset
        self._positions = positions
        self._first = 0

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return dict(self._positions.fingerprint)

    def start(self) -> None:
        """Records which epoch of the pipeline is the first of this `fit`."""
        self._first = self._positions.epoch

    def begin(self, number: int) -> None:
        """Nothing to do: the dataset counts its epochs by itself."""

    def state(self) -> dict[str, Any]:
        """As `Source.state`."""
        return {"first_epoch": self._first}

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[Any]:
        """As `Source.open`; the rest of a pass is a separate dataset."""
        self._first = int(state["first_epoch"])
        self._positions.seek(self._first + position.passes)
        if position.within_pass:
            yield self._positions.rest(self._first + position.passes - 1, position.taken)
        else:
            yield self.dataset


class ReplayedSource:
    """The source for data that can only be read from the beginning; resuming reads up to the position again.

    Args:
        kind: the kind of data, for messages.
        dataset: the dataset that Keras made of the argument of `fit`.
        replicas: the number of replicas of the job.
    """

    counted = False

    def __init__(self, kind: str, dataset: Any, replicas: int) -> None:
        self.kind = kind
        self.dataset = tuned(dataset)
        self._seed = upstream_tf.global_seed()
        self._distributed = isinstance(self.dataset, tf.distribute.DistributedDataset)
        self._replicas = replicas
        self._warned = False

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        # In a distributed dataset, TensorFlow has divided the batches by the number of replicas.
        return {"the number of replicas": self._replicas} if self._distributed else {}

    def start(self) -> None:
        """Nothing to do."""

    def begin(self, number: int) -> None:
        """Nothing to do: every iterator begins a pass."""

    def state(self) -> dict[str, Any]:
        """The global seed, from which the dataset's random operations may derive their seeds.

        Warns once if the dataset shuffles without a seed.
        """
        if not self._warned and not self._distributed and upstream_data.has_unseeded_shuffle(self.dataset):
            logger.warning(
                "The dataset shuffles without a seed, so a run that resumes from a checkpoint "
                "will not get the same batches. Call keras.utils.set_random_seed, or give shuffle a seed."
            )
        self._warned = True
        return {"seed": self._seed}

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[None]:
        """As `Source.open`; the value is None. Warns if the global seed has changed."""
        if state["seed"] != self._seed:
            logger.warning(
                "TensorFlow's global seed is %s, but was %s when the checkpoint was written: if the data "
                "is shuffled by it, its order is different. Call keras.utils.set_random_seed at the top of "
                "the program.",
                self._seed,
                state["seed"],
            )
        yield None


def source_of(adapter: Any, steps_per_epoch: int | None, layout: ReplicaLayout | None) -> Source:
    """The source for the data of a Keras data adapter.

    Args:
        adapter: Keras' data adapter.
        steps_per_epoch: the argument of `fit`, or None.
        layout: how the replicas are distributed; None under TensorFlow's own strategies.
    """
    if upstream_data.is_arrays(adapter):
        return ArraySource(adapter, layout)
    if upstream_data.is_py_dataset(adapter) and can_be_opened(adapter, steps_per_epoch):
        return PyDatasetSource(adapter, layout)
    dataset = adapter.get_tf_dataset()
    positions = own_positions(dataset)
    if positions is not None:
        return PipelineSource(dataset, positions)
    return ReplayedSource(upstream_data.kind_of(adapter), dataset, 1 if layout is None else layout.replicas)


def divided(dataset: Any, source: Source, strategy: Any, grouped: Callable[[Any], Any]) -> Any:
    """The iterable over a dataset's global batches, divided among the replicas of a strategy.

    Args:
        dataset: the source's dataset, or the rest of one of its passes.
        source: the source of the dataset.
        strategy: the model's strategy.
        grouped: returns an iterator over groups of batches for a single replica, or None.

    Returns:
        A `SplitDataset`, or a `tf.distribute.DistributedDataset` if TensorFlow divides the dataset.
    """
    layout = layout_of(strategy)
    if layout is None or _divided_by_tensorflow(dataset, layout):
        given = isinstance(dataset, tf.distribute.DistributedDataset)
        return dataset if given else strategy.experimental_distribute_dataset(dataset)
    exact = source.counted or counts_for_sure(dataset)
    arrays = isinstance(source, ArraySource) and dataset is source.dataset
    own = source.passes(layout) if isinstance(source, ArraySource) and arrays else None
    return SplitDataset(dataset, layout, exact=exact, own=own, grouped=grouped)


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
