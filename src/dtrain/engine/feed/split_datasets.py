"""Iterates over batches that are divided among the replicas, one iterator for each pass over the data.

`splitting.py` decides how the rows of a batch are split, and the source what a pass holds (`passes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import Split, packed, split_of, unconverted
from dtrain.engine.batches.splitting import split_batch
from dtrain.engine.feed.background_deletion import delete_in_background, start_deleting
from dtrain.engine.feed.batch_buffer import BatchBuffer
from dtrain.engine.feed.input_advice import may_be_buffered
from dtrain.engine.feed.passes import Pass
from dtrain.engine.feed.row_reader import RowReader
from dtrain.engine.feed.same_examples import FirstBatch
from dtrain.interfaces.dataset_parts import own_split
from dtrain.interfaces.replica_layout import ReplicaLayout


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
