"""Makes the batches of one epoch, each already divided over the replicas of this process.

It takes the order, the reader and the sharding as given. The pipeline decides which epoch it is, and hands
the batches to `fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from dtrain.data.epoch_counter import NoEpochs
from dtrain.data.readers import Stream, Table
from dtrain.data.source_shards import Shares
from dtrain.data.text_batches import Padding, bucketed, padded
from dtrain.engine.batches import example_order as order
from dtrain.engine.batches.batch_rows import (
    batch_rows,
    bounds,
    map_leaves,
    packed,
    part_sizes,
    some_rows,
    unconverted,
)
from dtrain.engine.batches.splitting import split_batch
from dtrain.errors import ConfigurationError
from dtrain.interfaces.replica_layout import ReplicaLayout


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The user's functions that each example passes through.

    Attributes:
        prepare: example -> example, deterministic; None leaves the example as it is.
        augment: (example, seed) -> example, after `prepare`; None leaves the example as it is.
        seed: the pipeline's seed, from which each example's seed is computed.
    """

    prepare: Callable[[Any], Any] | None
    augment: Callable[[Any, Any], Any] | None
    seed: int

    def applied(self, example: Any, seed: Any) -> Any:
        """Apply `prepare`, then `augment`, to an example."""
        if self.prepare is not None:
            example = self.prepare(example)
        if self.augment is not None:
            example = self.augment(example, seed)
        return example

    @property
    def nothing(self) -> bool:
        """Whether neither function is set."""
        return self.prepare is None and self.augment is None


class TableBatches:
    """Batches of a table; this process fetches only the rows of its own replicas.

    Args:
        table: the examples.
        places: the order of the examples, an `example_order.PlainOrder` or `BucketOrder`.
        layout: the replicas over which each batch of the order is divided.
        stages: the functions that each example passes through.
        padding: how examples of different lengths are padded; None leaves them ragged.
        share: the plan from which the rows of other workers are computed; None if a batch of the order is the
            global batch.

    Attributes:
        steps: number of batches in an epoch.
    """

    def __init__(
        self,
        table: Table,
        places: Any,
        layout: ReplicaLayout,
        stages: Stages,
        padding: Padding | None,
        share: Shares | None = None,
    ) -> None:
        self._table = table
        self._order = places
        self._layout = layout
        self._stages = stages
        self._padding = padding
        self._share = share
        self.steps: int = places.steps
        # Every replica gets the same number of slots: the rows of the largest part.
        self._slots = -(-places.batch // layout.replicas)

    def dataset(self, epochs: Any, first_step: int = 0, *, whole: bool = False) -> tf.data.Dataset:
        """The batches of an epoch from `first_step` on, as (parts, sizes).

        Args:
            epochs: attaches the epoch, as `EpochCounter` does.
            first_step: number of the first batch.
            whole: with one local replica, give the batch itself instead of (parts, sizes).
        """
        self._table.open()
        steps = epochs.attach(tf.data.Dataset.range(first_step, self._order.steps))
        if self._stages.nothing:
            fetched = unconverted(lambda epoch, step: _given(self._fetched(epoch, step), whole))
            return steps.map(fetched, num_parallel_calls=tf.data.AUTOTUNE)
        rows = steps.map(unconverted(self._raw), num_parallel_calls=tf.data.AUTOTUNE)
        examples = rows.unbatch().map(unconverted(self._example), num_parallel_calls=tf.data.AUTOTUNE)
        batches = batched(
            examples, self._slots * self._layout.local_replicas, dense=self._padding is not None
        )
        return batches.map(
            unconverted(lambda batch, step_info: _given(self._gathered(batch, step_info), whole))
        )

    def _fetched(self, epoch: Any, step: Any) -> Any:
        """The parts of a step, fetched as one batch (no `prepare`, no `augment`)."""
        at = self._order.at(epoch, step)
        batch = self._table.fetch(self._indices(epoch, at))
        if self._padding is not None:
            batch = self._padding.pad_batch(batch, self._widths(epoch, at))
        return self._divided(batch, at, step)

    def _raw(self, epoch: Any, step: Any) -> Any:
        """For each row of a step: the raw example, its seed, and (epoch, step, widths...)."""
        at = self._order.at(epoch, step)
        indices = self._indices(epoch, at)
        seeds = order.example_seeds(self._stages.seed, epoch, self._table.numbers(indices))
        count = self._slots * self._layout.local_replicas
        # At least one column: TensorFlow's `unbatch` crashes on rows without bytes.
        widths = tf.zeros([1], tf.int64)
        if self._padding is not None and self._padding.leaves:
            widths = self._widths(epoch, at)
        step_info = tf.repeat(tf.concat([[epoch, step], widths], axis=0)[None], count, axis=0)
        return self._table.fetch(indices), seeds, step_info

    def _example(self, raw: Any, seed: Any, each: Any) -> Any:
        example = self._stages.applied(raw, seed)
        if self._padding is not None:
            example = self._padding.pad_example(example, each[2:])
        return example, each[:2]

    def _gathered(self, batch: Any, each: Any) -> Any:
        """The parts of a step, from rows that were prepared one by one."""
        epoch, step = each[0][0], each[0][1]
        return self._divided(batch, self._order.at(epoch, step), step)

    def _indices(self, epoch: Any, at: order.BatchSpan) -> Any:
        """The indices of the examples in this process' slots; `_cut` drops the rows of unused slots."""
        starts = [self._bounds(at.rows, r)[0] for r in self._local]
        places = tf.stack(starts)[:, None] + tf.range(self._slots, dtype=tf.int64)[None]
        places = tf.clip_by_value(places, 0, tf.maximum(at.rows - 1, 0))
        return self._order.indices(epoch, at, tf.reshape(places, [-1]))

    def _widths(self, epoch: Any, at: order.BatchSpan) -> Any:
        if self._padding is None:
            raise RuntimeError("there is no padding")
        return self._padding.widths(at, self._order.indices(epoch, at, tf.range(tf.maximum(at.rows, 1))))

    def _divided(self, batch: Any, at: order.BatchSpan, step: Any) -> Any:
        """The local parts of a batch, and the sizes of the parts of all replicas."""
        sizes = part_sizes(at.rows, self._layout.replicas)
        parts = self._cut(batch, sizes[self._layout.first_replica :])
        return parts, sizes if self._share is None else sizes_of_all(self._share, self._layout, step)

    def _cut(self, batch: Any, sizes: Any) -> tuple[Any, ...]:
        parts = []
        for r in self._local:
            size = sizes[r]
            if self._order.even:
                start, end = bounds(self._order.batch, self._layout.first_replica + r, self._layout.replicas)
                size = end - start
            parts.append(
                map_leaves(lambda leaf, r=r, size=size: some_rows(leaf, r * self._slots, size), batch)
            )
        return tuple(parts)

    def _bounds(self, rows: Any, replica: int) -> tuple[Any, Any]:
        """The first row of a local replica's part, and the row after its last one: int64 scalars."""
        number = self._layout.first_replica + replica
        start, end = bounds(tf.cast(rows, tf.int32), number, self._layout.replicas)
        return tf.cast(start, tf.int64), tf.cast(end, tf.int64)

    @property
    def _local(self) -> range:
        return range(self._layout.local_replicas)


class StreamBatches:
    """Batches of a stream.

    Args:
        stream: the examples.
        batch: rows of a full batch.
        stages: the functions that each example passes through.
        shuffle_seed: seed of the order; None keeps the stream's own order.
        pad: value to pad with; None does not pad.
        buckets: upper bounds of the buckets' lengths, or None.
        drop_remainder: leave out batches that are not full.
    """

    def __init__(
        self,
        stream: Stream,
        batch: int,
        stages: Stages,
        *,
        shuffle_seed: int | None,
        pad: Any,
        buckets: tuple[int, ...] | None,
        drop_remainder: bool,
    ) -> None:
        self._stream = stream
        self._batch = batch
        self._stages = stages
        self._shuffle_seed = shuffle_seed
        self._pad = pad
        self._buckets = buckets
        self._drop = drop_remainder

    def dataset(self, epochs: Any, first_step: int = 0) -> tf.data.Dataset:
        """Undivided batches; batches before `first_step` are read and thrown away.

        Args:
            epochs: attaches the epoch, as `EpochCounter` does.
            first_step: number of the first batch.
        """

        def one(epoch: Any, example: Any, number: Any) -> Any:
            seed = order.example_seeds(self._stages.seed, epoch, number[None])[0]
            return self._stages.applied(example, seed)

        elements = self._stream.elements(epochs, self._shuffle_seed)
        examples = elements.map(unconverted(one), num_parallel_calls=tf.data.AUTOTUNE)
        if self._buckets is not None:
            batches = bucketed(examples, self._buckets, self._pad, self._batch, drop_remainder=self._drop)
        elif self._pad is not None:
            batches = padded(examples, self._pad, self._batch, drop_remainder=self._drop)
        else:
            batches = batched(examples, self._batch, drop_remainder=self._drop)
        return batches.skip(first_step)

    def endless_parts(
        self, epochs: Any, layout: ReplicaLayout, total: int, first_step: int
    ) -> tf.data.Dataset:
        """The batches as (parts, sizes), where each worker has its own infinite stream.

        Args:
            epochs: as for `dataset`.
            layout: the replicas of the job and of this process.
            total: rows of a global batch.
            first_step: number of the first batch.
        """
        batches = self.dataset(epochs, first_step)
        spec = batches.element_spec
        workers = [rows_of_worker(total, replace(layout, worker=worker)) for worker in range(layout.workers)]
        sizes = tf.reshape(part_sizes(workers, layout.local_replicas), [-1])

        def one(*batch: Any) -> Any:
            return _divided(packed(batch, spec), layout), sizes

        return batches.map(unconverted(one))

    def parts(self, epochs: Any, layout: ReplicaLayout, share: Shares) -> tf.data.Dataset:
        """The batches as (parts, sizes), where each worker has its own finite stream.

        Args:
            epochs: as for `dataset`.
            layout: the replicas of the job and of this process.
            share: the rows of each worker in each step. In a step without rows a worker gets an empty batch,
                so that all workers make the same number of steps.
        """
        mine = _steps_with_rows(share, layout.worker)
        steps = tf.data.Dataset.range(share.steps)
        # A worker without rows must count the epoch too: the counter is then attached to the steps.
        numbered = epochs.attach(steps) if mine == 0 else NoEpochs().attach(steps)
        batches = self.dataset(NoEpochs() if mine == 0 else epochs)
        empty = tf.data.Dataset.from_tensors(map_leaves(_empty, batches.element_spec))

        def one(batch: Any, step: Any) -> Any:
            planned = planned_rows(share, step[1])[layout.worker]
            check = tf.debugging.assert_equal(
                tf.cast(batch_rows(batch), tf.int64),
                planned,
                "a worker's source does not have as many examples as when it was counted",
            )
            with tf.control_dependencies([check] if check is not None else []):
                sizes = sizes_of_all(share, layout, step[1])
            return _divided(batch, layout), sizes

        filled = batches.take(mine).concatenate(empty.repeat(share.steps - mine))
        return tf.data.Dataset.zip((filled, numbered)).map(unconverted(one))


def sizes_of_all(share: Shares, layout: ReplicaLayout, step: Any) -> tf.Tensor:
    """The rows of each replica's part of a step where each worker has its own examples, an int32 vector.

    Args:
        share: the plan.
        layout: tells the number of each worker's replicas.
        step: the number of the step, int64 scalar.
    """
    return tf.reshape(part_sizes(planned_rows(share, step), layout.local_replicas), [-1])


def planned_rows(share: Shares, step: Any) -> tf.Tensor:
    """The rows of each worker's part of a step, an int64 vector; `step` is an int64 scalar."""
    counts, batches = tf.constant(share.counts, tf.int64), tf.constant(share.batches, tf.int64)
    return tf.clip_by_value(counts - step * batches, 0, batches)


def batched(
    examples: tf.data.Dataset, batch: int, *, drop_remainder: bool = False, dense: bool = False
) -> tf.data.Dataset:
    """Batch examples; vectors of unknown length become ragged, unless `dense` is set."""
    leaves = tf.nest.flatten(examples.element_spec)
    is_open = [not leaf.shape.is_fully_defined() for leaf in leaves]
    vectors = all(leaf.shape.rank == 1 for leaf, o in zip(leaves, is_open, strict=True) if o)
    if any(is_open) and vectors and not dense:
        return examples.ragged_batch(batch, drop_remainder=drop_remainder)
    return examples.batch(batch, drop_remainder=drop_remainder)


def _given(parts_and_sizes: Any, whole: bool) -> Any:
    return parts_and_sizes[0][0] if whole else parts_and_sizes


def _steps_with_rows(share: Shares, worker: int) -> int:
    """The number of steps in which a worker has rows."""
    if share.batches[worker] == 0:
        return 0
    return min(share.steps, -(-share.counts[worker] // share.batches[worker]))


def _divided(batch: Any, layout: ReplicaLayout) -> tuple[Any, ...]:
    """Divide a worker's batch over its own replicas."""
    return split_batch(batch, ReplicaLayout(local_replicas=layout.local_replicas)).parts


def _empty(spec: Any) -> Any:
    """A batch without rows."""
    inner = [n or 0 for n in spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *inner[1:]], spec.dtype)
        return tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype))
    return tf.zeros([0, *inner], spec.dtype)


def finished(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Set the options that all datasets of a pipeline have, and prefetch."""
    options = tf.data.Options()
    options.deterministic = True
    # With another policy TensorFlow would search the dataset for files and shard what it takes for names.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def rows_of_worker(batch: int, layout: ReplicaLayout) -> int:
    """The number of rows of a full global batch that this worker reads.

    Raises:
        ConfigurationError: the batch has fewer rows than the job has workers; all workers raise it.
    """
    if batch < layout.workers:
        raise ConfigurationError(
            f"batch={batch} is less than the {layout.workers} workers, of which each reads its own examples.",
            hint=f"batch={layout.workers} or more, or sharding='off'",
        )
    return (layout.worker + 1) * batch // layout.workers - layout.worker * batch // layout.workers
