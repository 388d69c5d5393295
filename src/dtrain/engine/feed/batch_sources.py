"""Chooses the source of global batches for given data, and iterates over its divided batches.

Whether all workers have the same data is checked in `same_examples.py`. The sources of datasets are in
`dataset_sources.py`, that of arrays in `arrays.py`, that of a `PyDataset` in `py_datasets.py`. `SplitDataset`
gives an iterator for each pass over the data. `splitting.py` decides how the rows of a batch are split, and
the source what a pass holds (`passes.py`).

**Deleting.** An iterator of TensorFlow's that tunes its pipeline has a thread that sleeps between two checks
of the pipeline: 10 ms at first, twice as long each time, up to a minute. Deleting the iterator waits until
that thread ends. TensorFlow wakes the thread, but sets the flag to end only afterwards, so the thread may
sleep again until its next check. If iterators were not deleted in the background, an epoch of a second would
end with up to a second of waiting. If one thread deleted all of them, those that follow would keep their data
in memory for as long.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import Split, packed, split_of, unconverted
from dtrain.engine.batches.splitting import split_batch
from dtrain.engine.feed.arrays import ArraySource
from dtrain.engine.feed.dataset_sources import PipelineSource, ReplayedSource
from dtrain.engine.feed.input_advice import counts_for_sure, may_be_buffered
from dtrain.engine.feed.passes import BatchBuffer, Pass, RowReader
from dtrain.engine.feed.position import DataPosition
from dtrain.engine.feed.py_datasets import PyDatasetSource, can_be_opened
from dtrain.engine.feed.same_examples import FirstBatch
from dtrain.interfaces.dataset_parts import own_positions, own_split
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_adapters
from dtrain.upstream import tf_data as upstream_datasets

_LONGEST = 70.0  # seconds; the thread of TensorFlow's iterator sleeps for at most a minute

_ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


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


class SplitDataset:
    """Batches of a `tf.data.Dataset`, divided over the replicas of this process.

    Iterating gives `SplitIterator`s; with one replica, these have whole batches as their only parts.

    Args:
        dataset: yields global batches.
        layout: how the replicas are distributed.
        exact: whether the number of batches that Keras knows is certain.
        filled: whether every replica surely has rows of each batch.
        own: a `Passes` that reads only this process' part of the batches; None if there is none.
        grouped: with one replica, returns an iterator over groups of the batches, or None for one over
            single batches.

    Attributes:
        element_spec: the spec of a global batch.
        first: the digest of the first batch; None if this process reads its own part only.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        layout: ReplicaLayout,
        *,
        exact: bool = False,
        filled: bool = False,
        own: Any = None,
        grouped: Callable[[tf.data.Dataset], Any] = lambda dataset: None,
    ) -> None:
        self.element_spec = dataset.element_spec
        self._dataset = dataset
        self._whole = layout.replicas == 1
        self._grouped = grouped
        if own is None:
            own = dataset if self._whole else own_split(dataset, layout)
        self.first = FirstBatch(dataset) if own is None and layout.workers > 1 else None
        self._parts = self._split(layout) if own is None else own
        self._exact = exact
        self._filled = filled
        self._counted = exact or int(dataset.cardinality()) >= 0

    def _split(self, layout: ReplicaLayout) -> tf.data.Dataset:
        """The dataset for a process that reads whole batches, and splits each after reading it."""
        options = tf.data.Options()
        if layout.workers > 1:
            # All workers must see the same batches in the same order.
            options.deterministic = True
        dataset, first = self._dataset, self.first

        @unconverted
        def parts(*batch: Any) -> Any:
            return tuple(split_batch(packed(batch, self.element_spec), layout))

        @unconverted
        def noted_parts(number: Any, batch: Any) -> Any:
            batch = batch if isinstance(batch, tuple) else (batch,)
            with tf.control_dependencies([first.note(number, batch)]):  # type: ignore[union-attr]
                return parts(*batch)

        split = dataset.map(parts) if first is None else dataset.enumerate().map(noted_parts)
        split = split.with_options(options)
        return split.prefetch(tf.data.AUTOTUNE) if may_be_buffered(dataset) else split

    def __iter__(self) -> Any:
        groups = self._grouped(self._dataset) if self._whole else None
        return groups or SplitIterator(
            iter(self._parts),
            self.element_spec,
            counted=self._counted,
            exact=self._exact,
            filled=self._filled,
            whole=self._whole,
        )


class SplitIterator:
    """Iterates over the batches of one pass, as `Split`s.

    Args:
        iterator: TensorFlow's, or a `Pass`.
        batch_spec, counted, exact, filled: as the attributes.
        whole: whether it yields whole batches, for the only replica.

    Attributes:
        batch_spec: the spec of a global batch.
        counted: whether the number of batches was known beforehand.
        exact: whether that number is certain.
        filled: whether every replica surely has rows of each batch.
        whole: as given.
    """

    def __init__(
        self,
        iterator: Any,
        batch_spec: Any,
        *,
        counted: bool,
        exact: bool = False,
        filled: bool = False,
        whole: bool = False,
    ) -> None:
        start_deleting()
        self._iterator = iterator
        self.batch_spec = batch_spec
        self.counted = counted
        self.exact = exact
        self.filled = filled
        self.whole = whole

    @property
    def element_spec(self) -> Any:
        """The spec of `(parts, sizes)`."""
        spec = self._iterator.element_spec
        return ((spec,), None) if self.whole else spec

    @property
    def left(self) -> int | None:
        """How many batches are left in the pass; None if only reading shows it."""
        return self._iterator.left if isinstance(self._iterator, Pass) else None

    @property
    def reader(self) -> RowReader | None:
        """What reads batches into a buffer; None if TensorFlow's iterator yields single batches."""
        return self._iterator.reader if isinstance(self._iterator, Pass) else None

    @property
    def at_once(self) -> int:
        """How many full batches `reader` reads next; 0 if none, or if batches are left in the buffer."""
        return self._iterator.at_once if isinstance(self._iterator, Pass) else 0

    def tensors(self) -> tuple[Any, BatchBuffer | None]:
        """What to read from: TensorFlow's iterator and None, or the data of `reader` and a buffer.

        A caller that reads from them must call `note` afterwards.
        """
        return self._iterator.tensors() if isinstance(self._iterator, Pass) else (self._iterator, None)

    @property
    def specs(self) -> tuple[Any, BatchBuffer | None]:
        """The specs of `tensors`, for a function that serves all iterators of equal specs and reader."""
        return self._iterator.specs if isinstance(self._iterator, Pass) else self.tensors()

    def note(self, batches: int, buffer: BatchBuffer | None) -> None:
        """Notes how many batches were read from `tensors`, and the buffer that is left."""
        if isinstance(self._iterator, Pass):
            self._iterator.note(batches, buffer)

    def __iter__(self) -> SplitIterator:
        return self

    def __next__(self) -> Split:
        return split_of(next(self._iterator), whole=self.whole)

    def __del__(self) -> None:
        # The attribute is missing if `__init__` has failed.
        delete_in_background(self.__dict__.pop("_iterator", None))


def start_deleting() -> None:
    """Starts the thread that deletes iterators; must be called before the first `delete_in_background`.

    The process ends only after all these iterators are deleted, or after `_LONGEST` seconds, because
    TensorFlow cannot shut down while an iterator exists.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_delete, name="dtrain-ended-iterators", daemon=True)
            _thread.start()
            atexit.register(_finish, _thread)


def delete_in_background(iterator: Any) -> None:
    """Deletes an iterator in the background; may be called during garbage collection.

    Args:
        iterator: TensorFlow's iterator; the caller must keep no reference to it.
    """
    held = [iterator]
    del iterator  # the thread that drops the last reference waits for the deletion
    _ended.put(held)


def _delete() -> None:
    """Deletes each iterator in a thread of its own, so that none waits for another one to end."""
    threads: list[threading.Thread] = []
    while (held := _ended.get()) is not None:
        threads = [thread for thread in threads if thread.is_alive()]
        thread = threading.Thread(target=held.clear, name="dtrain-ended-iterator", daemon=True)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # Python 3.12 and later start none while they end
            held.clear()
    for thread in threads:
        thread.join()


def _finish(thread: threading.Thread) -> None:
    _ended.put(None)
    thread.join(_LONGEST)
    if thread.is_alive():
        logger.warning("An iterator over data does not end: something that it reads from is stuck.")


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
