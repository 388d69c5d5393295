"""The input pipeline: prepare, cache, shuffle, augment, batch; each example once an epoch over all workers.

It combines `readers.py`, `example_order.py`, `batching.py` and `text_batches.py` into a dataset for `fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.base.words import whole_number
from dtrain.data import source_shards as rules
from dtrain.data.arguments import taking
from dtrain.data.batching import Stages, StreamBatches, TableBatches, finished, rows_of_worker
from dtrain.data.columns import ColumnTable
from dtrain.data.epoch_counter import EpochCounter, EpochPositions
from dtrain.data.readers import FunctionStream, TableStream, cached
from dtrain.data.sources import Share, source_of
from dtrain.data.text_batches import Padding, check_pad, padding_of
from dtrain.engine.batches.example_order import BucketOrder, PlainOrder
from dtrain.engine.install import install
from dtrain.errors import BackendError, ConfigurationError, DataError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.ranks import world_size
from dtrain.process_group.value_exchange import exchange

_WHOLE = Share()


class Pipeline:
    """Batches of examples for `fit`, `evaluate` and `predict`, the same under every strategy.

    Each epoch has its own order, computed from the seed and the number of the epoch. The order is the same in
    every process and in every run, and needs no shuffle buffer. The stages run in this order: `transform`,
    cache, shuffle, `augment`, batch, prefetch. TFRecord files that are not cached are read sequentially:
    shuffling then changes the order of the files each epoch, interleaves four files, and permutes records
    within blocks of about 64 MB. If the source is a function, its dataset decides the order.

    Make it before or after the strategy. For a loop of your own, call `dataset()` after the strategy is made.

    Args:
        source: arrays or lists of one length in a tuple, named tuple or dictionary; `tfrecords(...)` or
            `array_records(...)`; or a function `InputContext -> tf.data.Dataset` of single examples, which
            divides them by `context.num_input_pipelines` and `context.input_pipeline_id`.
        batch: examples in a global batch, over all replicas; 64 by default.
        batch_size: Keras' word for `batch`.
        shuffle: give each epoch its own order; if False, every epoch has the source's order.
        seed: seed of the order and of `augment`.
        transform: example -> example, deterministic, of TensorFlow operations. An example has the structure
            of the source: it is a tuple if the source is a tuple.
        augment: (example, seed) -> example; `seed` is an int32 tensor of shape (2,) for TensorFlow's
            stateless random functions. It is computed from the pipeline's seed, the epoch and the example's
            number, so it is the same under every strategy and for any number of workers.
        cache: keep all prepared examples in memory. Records of TFRecord files can then be fetched in any
            order. Under sharding "file" and "function" a worker keeps only its own share: a custom loop over
            `dataset()` then reads and prepares all examples in each epoch.
        sharding: how the workers divide the source. "data": each worker fetches its own rows of every global
            batch (from TFRecord files: reads all records and keeps its rows); the batches are the same as on
            one device. "file": each worker reads its own files, so batches hold other examples than on one
            device. "function": each worker calls the function. "off": each worker reads everything and takes
            its part of each batch. "auto" chooses by the rules of `dtrain.data.source_shards.choose`.
        pad: value to pad examples of different lengths with, up to the longest of the global batch; True is
            0. Under sharding "file" and "function": up to the longest of the worker's own part.
        buckets: upper bounds of lengths, such as [16, 32, 64]: each batch holds examples of one bucket,
            padded to its bound. Examples above the last bound make one more bucket, padded to the longest of
            a batch. The last batch of each bucket may be short.
        drop_remainder: leave out batches that are not full.

    Raises:
        ConfigurationError: an argument is malformed, or the source cannot be divided by that sharding.
        DataError: the source is empty, or its arrays do not fit together.

    Example:
        ```python
        print(dtrain.data.Pipeline(dtrain.data.load_digits().train, batch=64).explain(workers=2))
        ```
    """

    def __init__(
        self,
        source: Any,
        batch: int | None = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, Any], Any] | None = None,
        cache: bool = False,
        sharding: str = "auto",
        pad: Any = None,
        buckets: Sequence[int] | None = None,
        drop_remainder: bool = False,
    ) -> None:
        if batch is not None and batch_size is not None:
            raise ConfigurationError(
                f"batch={batch!r} and batch_size={batch_size!r} were both given, but they mean the same.",
                hint="leave one of them out",
            )
        name = "batch" if batch_size is None else "batch_size"
        given = batch if batch_size is None else batch_size
        self.batch = whole_number(64 if given is None else given, name, 1)
        self._seed = whole_number(seed, "seed")
        self._shuffle = bool(shuffle)
        self._transform = taking(transform, 1, "transform", "the example")
        self._augment = taking(augment, 2, "augment", "the example and its seed")
        self._cache = bool(cache)
        self._pad, self._buckets = check_pad(pad, buckets)
        self._drop = bool(drop_remainder)
        self._source = source_of(source)
        self._sharding = sharding
        rules.choose(sharding, self._kind, 1)
        if self.examples is not None:
            rules.steps_of(self.examples, self.batch, drop_remainder=self._drop)
        self._kept: dict[Any, Any] = {}
        with contextlib.suppress(BackendError):  # other backends than TensorFlow cannot train on a pipeline
            install()

    @property
    def examples(self) -> int | None:
        """The number of examples in an epoch; None if the source is a function."""
        return self._source.examples

    def __len__(self) -> int:
        """The number of batches in an epoch.

        Raises:
            TypeError: the number is not known before the source is read.
        """
        if self._buckets or self.examples is None:
            steps = self._whole_batches()[1]
        else:
            steps = rules.steps_of(self.examples, self.batch, drop_remainder=self._drop)
        if steps is None:
            raise TypeError("the number of batches is not known: the source does not say how long it is")
        return steps

    def explain(self, workers: int | None = None) -> str:
        """One line that says how the workers divide the source, and why.

        Args:
            workers: number of workers; None takes the number of this job.

        Raises:
            ConfigurationError: so many workers cannot divide the source by the chosen sharding.
        """
        workers = world_size() if workers is None else workers
        choice = rules.choose(self._sharding, self._kind, workers)
        asked = "" if choice.word == self._sharding else f" (asked for: {self._sharding})"
        many = "1 worker" if workers == 1 else f"{workers} workers"
        return f"{self._kind.name}, {many}: sharding={choice.word!r}{asked}, {choice.reason}"

    def dataset(self, *, first_epoch: int = 0, first_step: int = 0) -> tf.data.Dataset:
        """A dataset of global batches, as `fit` takes it; each new iteration over it is the next epoch.

        Args:
            first_epoch: number of the first epoch, for a run that resumes.
            first_step: begin the first epoch at this batch. The dataset then ends with this epoch. Skipped
                batches are not read, except from TFRecord files and functions, which are read sequentially.

        Raises:
            ConfigurationError: an argument is negative, or the epoch has no batch `first_step`.
        """
        first_epoch = whole_number(first_epoch, "first_epoch", 0)
        first_step = whole_number(first_step, "first_step", 0)
        counter = EpochCounter(first_epoch, only=first_step > 0)
        batches, steps, endless = self._whole_batches()
        if steps is not None and first_step >= steps:
            raise ConfigurationError(
                f"first_step={first_step} was set, but an epoch has {steps} batches.", hint="count from 0"
            )
        dataset = batches(counter, first_step)
        if steps is not None or endless:
            left = tf.data.INFINITE_CARDINALITY if steps is None else steps - first_step
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(left))
        dataset = finished(dataset)
        dataset.dtrain_split = lambda layout: self._split(layout, counter, first_step)
        if not first_step:
            order = {"batch": self.batch, "seed": self._seed, "shuffle": self._shuffle}
            dataset.dtrain_positions = EpochPositions(counter, self.dataset, order)
        return dataset

    def dtrain_dataset(self, used_by: str) -> tf.data.Dataset:
        """The dataset that Keras gets for this pipeline; see `dataset_parts.datasets_in_place`.

        Raises:
            ConfigurationError: `predict` was given a pipeline that shuffles, so that the predictions would
                not be in the order of the examples.
        """
        if used_by == "predict" and self._shuffle:
            raise ConfigurationError(
                "predict was given a Pipeline that shuffles: the predictions could not be matched with "
                "the examples.",
                hint="make it with shuffle=False",
            )
        return self.dataset()

    def _keeps_shares(self) -> bool:
        """Whether each worker caches only its own share, so that no process may cache all examples."""
        word = rules.choose(self._sharding, self._kind, world_size()).word
        return self._cache and word in ("file", "function")

    @property
    def _kind(self) -> rules.SourceKind:
        source = self._source
        return rules.SourceKind(
            name=source.name,
            random_access=source.random_access,
            counts=source.counts,
            function=source.function,
            cached=self._cache,
            shuffled=self._shuffle,
            padded=self._pad is not None,
            bucketed=self._buckets is not None,
        )

    @property
    def _order_seed(self) -> int | None:
        return self._seed if self._shuffle else None

    def _reader(self, share: Share = _WHOLE, *, keep: bool = True) -> tuple[Any, Stages]:
        """The reader (a table or a stream) of a share of the source, and the stages that it has not applied.

        With `keep=False` the examples are not cached, even if `cache` is set.
        """
        reader = self._source.open(share)
        prepare = self._source.prepared_by(self._transform)
        done = prepare is None and isinstance(reader, ColumnTable)
        if self._cache and reader.examples != 0 and not done:
            if reader.endless:
                raise DataError("cache=True was set for data without an end.", hint="cache=False")
            if keep:
                if ("cache", share.key) not in self._kept:
                    self._kept["cache", share.key] = cached(reader, prepare)
                reader, prepare = self._kept["cache", share.key], None
        return reader, Stages(prepare=prepare, augment=self._augment, seed=self._seed)

    def _padding(self, table: Any, stages: Stages, key: Any) -> Padding | None:
        if self._pad is None:
            return None
        if ("padding", key) not in self._kept:
            self._kept["padding", key] = padding_of(self._pad, table, stages.prepare)
        return self._kept["padding", key]

    def _whole_batches(self) -> tuple[Callable[[Any, int], tf.data.Dataset], int | None, bool]:
        """A function that makes the global batches, their number or None, and whether they are endless."""
        reader, stages = self._reader(keep=not self._keeps_shares())
        if hasattr(reader, "fetch"):
            table = self._table_batches(reader, stages, ReplicaLayout())
            steps = table.steps
            return lambda epochs, first: table.dataset(epochs, first, whole=True), steps, False
        stream = self._stream_batches(reader, stages, self.batch)
        known = (
            None
            if self._buckets or reader.examples is None
            else rules.steps_of(reader.examples, self.batch, drop_remainder=self._drop)
        )
        return stream.dataset, known, reader.endless

    def _table_batches(self, table: Any, stages: Stages, layout: ReplicaLayout) -> TableBatches:
        """Global batches of a table, divided over the replicas of all workers."""
        padding = self._padding(table, stages, None)
        if self._buckets is not None and padding is not None:
            order: Any = BucketOrder(
                padding.longest, self._buckets, self.batch, self._order_seed, drop_remainder=self._drop
            )
            if order.steps == 0:
                raise DataError(
                    f"drop_remainder=True leaves no batch of {self.batch} in any bucket.",
                    hint="a smaller batch, fewer buckets, or drop_remainder=False",
                )
        else:
            steps = rules.steps_of(table.examples, self.batch, drop_remainder=self._drop)
            order = PlainOrder(table.examples, self.batch, steps, self._order_seed)
        return TableBatches(table, order, layout, stages, padding)

    def _stream_batches(
        self, stream: Any, stages: Stages, batch: int, *, drop: bool | None = None
    ) -> StreamBatches:
        return StreamBatches(
            stream,
            batch,
            stages,
            shuffle_seed=self._order_seed,
            pad=self._pad,
            buckets=self._buckets,
            drop_remainder=self._drop if drop is None else drop,
        )

    def _split(self, layout: ReplicaLayout, counter: EpochCounter, first_step: int) -> tf.data.Dataset | None:
        """The batches divided over this process' replicas; None if the engine should divide global batches.

        Every worker must call it, because the workers exchange and compare their settings.
        """
        choice = rules.choose(self._sharding, self._kind, layout.workers)
        logger.info("Worker %d: %s.", layout.worker, self.explain(layout.workers))
        if self.batch < layout.replicas and layout.worker == 0:
            logger.warning(
                "batch=%d is over all %d replicas: some of them have nothing to do in any step.",
                self.batch,
                layout.replicas,
            )
        mine = None
        if choice.word == "function":
            context = tf.distribute.InputContext(layout.workers, layout.worker, layout.replicas)
            reader, stages = self._reader(Share(context=context))
            mine = reader.count() if isinstance(reader, FunctionStream) else reader.examples
        counts = self._agreed(layout, counter, mine)
        if choice.word == "function":
            self._check_divided(counts)
        if choice.word == "off":
            return None
        if choice.word == "data":
            reader, stages = self._reader()
            batches = self._table_batches(reader, stages, layout)
            return finished(batches.dataset(counter, first_step))
        if choice.word == "file":
            examples = self._source.counts
            divided = rules.divide_files(examples, layout.workers)
            counts = [sum(examples[file] for file in files) for files in divided]
            reader, stages = self._reader(Share(files=divided[layout.worker]))
        return finished(self._own_share(reader, stages, layout, counts, counter, first_step))

    def _agreed(self, layout: ReplicaLayout, counter: EpochCounter, mine: int | None) -> list[Any]:
        """Checks that all workers have the same pipeline; returns each worker's number of function examples.

        Raises:
            DataError: the workers' pipelines differ.
        """
        compared = {
            "the number of examples": self.examples,
            "batch": self.batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sharding": self._sharding,
            "buckets": self._buckets,
            "the examples of each file": self._source.counts,
            "the epoch that comes next": counter.next,
        }
        everyone = exchange(layout, (compared, mine))
        for setting in compared:
            values = [settings.get(setting) for settings, _ in everyone]
            if any(value != values[0] for value in values):
                listed = "; ".join(f"worker {worker}: {value}" for worker, value in enumerate(values))
                raise DataError(
                    f"The workers' pipelines differ in {setting} ({listed}).",
                    hint="make the same pipeline in every worker, and iterate over it equally often",
                )
        return [count for _, count in everyone]

    def _check_divided(self, counts: list[Any]) -> None:
        """Compares the examples that a function gives all workers with those that it gives a single process.

        Raises:
            DataError: the numbers differ, or the data is endless for some workers only.
        """
        endless = [count is None for count in counts]
        if any(endless) and not all(endless):
            raise DataError(
                "The function gives some workers examples without end, and others not.",
                hint="repeat() the dataset in every worker, or in none",
            )
        alone = self._source.open(_WHOLE).examples
        if alone is not None and not any(endless) and sum(counts) != alone:
            raise DataError(
                f"The function gives one process {alone} examples, but {len(counts)} workers {sum(counts)} "
                "together.",
                hint="dataset.shard(context.num_input_pipelines, context.input_pipeline_id)",
            )

    def _own_share(
        self,
        reader: Any,
        stages: Stages,
        layout: ReplicaLayout,
        counts: list[Any],
        counter: EpochCounter,
        first_step: int,
    ) -> tf.data.Dataset:
        """The batches where each worker reads its own share of the examples."""
        if reader.endless:
            part = rows_of_worker(self.batch, layout)
            stream = self._stream_batches(reader, stages, part)
            return stream.endless_parts(counter, layout, self.batch, first_step)
        share = rules.shares(counts, self.batch, drop_remainder=self._drop)
        own = ReplicaLayout(local_replicas=layout.local_replicas)
        batch = share.batches[layout.worker]
        if hasattr(reader, "fetch") and reader.examples > 0 and batch > 0:
            padding = self._padding(reader, stages, layout.worker)
            order = PlainOrder(reader.examples, batch, share.steps, self._order_seed, layout.worker)
            table = TableBatches(reader, order, own, stages, padding, share)
            return table.dataset(counter, first_step)
        stream = self._stream_batches(
            TableStream(reader) if hasattr(reader, "fetch") else reader, stages, max(batch, 1), drop=False
        )
        return stream.parts(counter, layout, share).skip(first_step)
