"""Opens the data feed of a `fit` at the position of a checkpoint, by reading again if nothing else works.

How a source opens a position is not decided here, but in the files of the sources.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.feed.position import DataPosition, restored
from dtrain.errors import DataError
from dtrain.upstream import keras_adapters

_Base: Any = object  # type checkers do not know Keras' iterator, the next base class of `EpochIterator`


class ResumableFeed(_Base):  # type: ignore[misc]
    """The part of a `DataFeed` that resumes at a position; the attributes are those of the `DataFeed`."""

    data_adapter: Any
    steps_per_execution: int
    _num_batches: int | None
    _steps_seen: int
    _current_iterator: Any
    _epoch_iterator: Any
    _batches: int
    _passes: int
    _made: int
    _reading: Any
    _prepared: tuple[int, Iterator[Any]] | None
    _replayed: DataPosition | None

    def open(self, saved: dict[str, Any]) -> None:
        """Resumes at a position: the next epoch, or a running one that has read nothing, continues there.

        Args:
            saved: what `position` returned.

        Raises:
            DataError: it is a position in other data, or the data end before it.
            RuntimeError: batches have been read already.
        """
        if self._batches:
            raise RuntimeError("open was called after training had begun")
        position = restored(saved, self._fingerprint)
        self._epochs = position.epochs
        before = self._source.dataset
        with self._source.open(position, saved["source"]) as rest:
            if self._source.dataset is not before:
                self._distributed_dataset = self._divided(self._source.dataset)
            steps = self._replay(position) if rest is None else self._begin_at(position, rest)
        self._passes, self._made, self._batches = position.passes, position.made, position.batches
        if self._running:
            self._epoch_iterator = steps
            self._first = self._done = position.steps
        else:
            self._prepared = position.steps, steps

    def reopen(self, saved: dict[str, Any]) -> None:
        """As `open`, between two steps of the running epoch, of which steps may have been made."""
        self._batches = self._passes = self._made = self._steps_seen = 0
        self._current_iterator = self._reading = None
        self.open(saved)

    def end_epoch(self) -> None:
        """Ends the running epoch before its next step."""
        self._epoch_iterator = iter(())

    def _begin_at(self, position: DataPosition, rest: Any) -> Iterator[Any]:
        """The calls of the epoch that continues at a position; `rest` holds the rest of its pass."""
        self._num_batches, self._passes = position.num_batches, position.passes
        self._steps_seen = position.taken if position.goes_on else 0
        self._current_iterator = None
        if position.steps and not position.over:
            self.data_adapter.on_epoch_begin()
        if position.within_pass:
            whole = rest is self._source.dataset
            self._current_iterator = iter(self._distributed_dataset if whole else self._divided(rest))
            self._reading = self._current_iterator
        if position.over:
            return iter(())
        return self._calls(position.steps) if position.steps else self._enumerate_iterator()

    def _replay(self, position: DataPosition) -> Iterator[Any]:
        """As `_begin_at`, for a source that must be read again from its beginning, in the same order."""
        logger.info(
            "%s cannot begin elsewhere than at its beginning: it is replayed; %d batches are read again.",
            self._source.kind.capitalize(),
            position.batches,
        )
        begun = time.monotonic()
        self._replayed = position
        try:
            for _ in range(position.whole_epochs):
                self._replay_epoch()
            steps: Iterator[Any] = iter(()) if position.over else self._enumerate_iterator()
            for _ in range(0, position.steps if not position.over else 0, self.steps_per_execution):
                self._read(next(steps)[2])
        except (StopIteration, tf.errors.OutOfRangeError):
            raise DataError(
                f"{self._source.kind.capitalize()} ended before the place where the checkpoint was written.",
                hint="Give fit the same data as before.",
            ) from None
        finally:
            self._replayed = None
        logger.info("Read again in %.1f s.", time.monotonic() - begun)
        return steps

    def _replay_epoch(self) -> None:
        """Reads an epoch's batches as `fit` would, and drops them."""
        with keras_adapters.epoch_iterator_base().catch_stop_iteration(self):
            for _, _, iterator in self._enumerate_iterator():
                try:
                    self._read(iterator)
                except tf.errors.OutOfRangeError:
                    raise StopIteration from None

    def _read(self, iterator: Any) -> None:
        """Reads and drops the batches of one call of the train function; raises if the data have ended."""
        self._reading = iterator
        next(iterator)
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            for _ in range(self.steps_per_execution - 1):
                next(iterator)
