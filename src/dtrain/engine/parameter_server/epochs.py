"""Epoch iterators of `fit` and `evaluate` under parameter servers: an epoch ends when its blocks are done.

They extend Keras' epoch iterators. They neither read batches nor run blocks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.feed.arrays import ArraySource
from dtrain.engine.parameter_server.block_batches import PassRows
from dtrain.engine.parameter_server.block_functions import AsynchronousFunction, EpochRun
from dtrain.engine.parameter_server.block_program import BlockTotals
from dtrain.errors import DataError


@functools.cache
def asynchronous_epochs(base: Any) -> Any:
    """Derives the class of epoch iterators for parameter servers from another class of epoch iterators."""

    class AsynchronousEpochs(base):  # type: ignore[misc]
        """An epoch iterator that waits for the submitted blocks at the end of each epoch.

        Attributes:
            run: the run of the train or test function that takes this epoch's batches; None before the first.
            every_batch: whether a callback needs the results of every call.
            total: how many batches the epoch has from the running call on; None if unknown.
        """

        run: EpochRun | None = None

        def _divided(self, dataset: tf.data.Dataset) -> Any:
            source = self._source
            rows = isinstance(source, ArraySource) and dataset is source.dataset and source.reads_rows
            return _EpochData(dataset, self, source if rows else None)

        @property
        def every_batch(self) -> bool:
            return self._loop.every_batch

        @property
        def total(self) -> int | None:
            steps: int | None = self.steps_per_epoch or self._num_batches
            return None if steps is None else steps - self._done + self.steps_per_execution

        def needs_run(self, function: AsynchronousFunction) -> bool:
            """Whether a function must begin a run: the epoch has none, or that of a function before it."""
            run = self.run
            return run is None or (run.function is not function and run.ahead == 0)

        def leave_run(self) -> None:
            """Ends the run of another function, if there is one, before a run that takes the next batches."""
            if self.run is not None:
                self.run.finish()
                self._count_blocks(self.run)

        def rest(self) -> bool:
            """As `EpochRun.rest`; True before the first batch."""
            return self.run is None or self.run.rest()

        @contextlib.contextmanager
        def catch_stop_iteration(self) -> Iterator[None]:
            self.run, self._loop.blocks = None, BlockTotals()
            try:
                with super().catch_stop_iteration():
                    yield
            except BaseException:
                if self.run is not None:
                    self.run.abandon()
                raise

        def _at_rest(self) -> bool:
            return self.run is None or self.run.ahead == 0

        def _await_steps(self) -> None:
            if self.run is not None:
                self.run.end()
                self._count_blocks(self.run)

        def _count_blocks(self, run: EpochRun) -> None:
            self._loop.blocks = self._loop.blocks.plus(run.totals)

    return AsynchronousEpochs


class EpochBatches:
    """An iterator over the batches of one pass through a dataset.

    Attributes:
        element_spec: the spec of a batch.
        epochs: the epoch iterator that the batches belong to.
        counted: whether the number of batches is known beforehand.
        iterator: TensorFlow's iterator, or a `PassRows`.
    """

    def __init__(self, iterator: Any, epochs: Any, *, counted: bool) -> None:
        self.iterator = iterator
        self.element_spec = iterator.element_spec
        self.epochs = epochs
        self.counted = counted

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class _EpochData:
    """A dataset whose iterators hold a reference to the epoch iterator that they belong to.

    Making an iterator of TensorFlow's takes as long as dozens of small steps, so arrays are read without one.

    Args:
        dataset: the batches.
        epochs: the epoch iterator.
        arrays: the source whose rows are read instead; None to read the dataset.
    """

    def __init__(self, dataset: tf.data.Dataset, epochs: Any, arrays: ArraySource | None) -> None:
        self._arrays = arrays
        self._dataset = dataset
        self._epochs = epochs
        self._counted = int(dataset.cardinality()) >= 0

    def __iter__(self) -> EpochBatches:
        try:
            iterator = iter(self._dataset) if self._arrays is None else PassRows(self._arrays)
        except tf.errors.InvalidArgumentError as error:
            if "unknown device" not in str(error):
                raise
            raise DataError(
                "The dataset was made before the strategy: connecting to the cluster has renamed the device "
                "that it is on.",
                hint="make the strategy first, at the top of the program, then datasets and models",
            ) from error
        return EpochBatches(iterator, self._epochs, counted=self._counted)
