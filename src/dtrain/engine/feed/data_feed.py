"""The data feed of `fit`, `evaluate` and `predict`: Keras' epoch iterator, opened at any position.

It counts steps as Keras' own iterator does, and yields batches that are divided among the replicas. How a
source opens a position is not decided here, but in the files of the sources.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dtrain.engine.feed import batch_sources, split_datasets
from dtrain.engine.feed.array_datasets import tf_dataset
from dtrain.engine.feed.groups import GroupIterator, Groups, batch_size_of, can_be_grouped
from dtrain.engine.feed.position import DataPosition
from dtrain.engine.feed.resumption import ResumableFeed
from dtrain.engine.feed.same_examples import (
    OwnRows,
    check_counts,
    check_first_batches,
    check_own,
    check_same_data,
)
from dtrain.engine.loops.call_size import CallSize
from dtrain.engine.loops.loop import current_loop
from dtrain.engine.loops.step_calls import Call, GroupCall, LastStep
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.telemetry import events
from dtrain.upstream import keras_adapters, keras_models


class DataFeed(ResumableFeed):
    """The data of one `fit`, `evaluate` or `predict`, in epochs.

    Each iteration over it is an epoch, whose `next` is a call of the train function with its batches.
    `position` returns where the next batch is, and `open` resumes there. List this class before Keras'
    epoch iterator, whose methods it overrides.

    Attributes:
        element_spec: the spec of a global batch.
    """

    data_adapter: Any  # this and what follows are attributes of Keras' iterator
    steps_per_epoch: int | None
    steps_per_execution: int
    _num_batches: int | None
    _steps_seen: int
    _current_iterator: Any
    _epoch_iterator: Any

    def __init__(self, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        keras_adapters.epoch_iterator_base().__init__(self, *args, **kwargs)
        self._distribute_strategy = distribute_strategy
        self._loop = current_loop().of_new_iterator()
        layout = self._layout = layout_of(distribute_strategy)
        watched = layout is None or self._loop.every_batch
        alone = layout is not None and self._loop.kind == "fit" and layout.average_every > 0
        self._call_size = CallSize(layout or ReplicaLayout(), every_batch=watched, alone=alone)
        self._groups: Groups | None = None
        self._in_xla: bool | None = None  # None until the first iterator over the data is made
        # The members of a quorum divide the batches of training; each evaluates on all of its data.
        trains = self._loop.kind == "fit"
        self._divided_by = layout.reading if layout is not None and trains else layout
        self._source = batch_sources.source_of(self.data_adapter, self.steps_per_epoch, self._divided_by)
        dataset = self._source.dataset
        self.element_spec = dataset.element_spec
        self._fingerprint = self._source.fingerprint | {
            "the kind of data": self._source.kind,
            "the number of batches": self._num_batches,
            "steps_per_epoch": self.steps_per_epoch,
            "shapes and types": str(self.element_spec),
        }
        if (
            layout is not None
            and layout.workers > 1
            and not batch_sources.divided_by_tensorflow(dataset, layout)
        ):
            digest = getattr(self._source, "digest", lambda: None)
            check_same_data(dataset, self.steps_per_epoch, layout, digest)
        self._distributed_dataset = self._divided(dataset)
        if layout is not None and isinstance(self._distributed_dataset, tf.distribute.DistributedDataset):
            self._num_batches = batch_sources.common_steps(self._distributed_dataset, layout)
            self.data_adapter = batch_sources.CountedAdapter(self.data_adapter, self._num_batches)
        self._forget()
        self._loop.session.attach(self)

    def _forget(self) -> None:
        """Resets all counts, as if nothing had been read."""
        self._epochs = 0  # epochs that have ended
        self._first = 0  # the step at which the running epoch began here
        self._done = 0  # steps of the running epoch that are done; the number of the next step
        self._running = False  # whether an epoch has begun and not ended
        self._ended_by_next = False  # whether the loop over its calls has ended by itself
        self._over = False  # whether the running epoch has found the end of the data
        self._passes = 0  # passes over the data that have begun
        self._made = 0  # iterators over the data, including those that were never read
        self._batches = 0  # batches of all epochs that are done
        self._digests: list[list[int]] | None = None  # of the first batch of the pass
        self._own = OwnRows()
        self._reading: Any = None  # the last iterator from which a batch was read
        self._prepared: tuple[int, Iterator[Any]] | None = None  # the next epoch's first step and its calls
        self._call: Call | None = None  # the last call, until its result is noted
        self._replayed: DataPosition | None = None  # the position up to which batches are read and dropped

    def _divided(self, dataset: Any) -> Any:
        """The iterable over a dataset of global batches, divided among the replicas."""
        feed = weakref.proxy(self)  # a cycle would keep the tensors of the data into the next `fit`
        source, strategy = self._source, self._distribute_strategy
        return batch_sources.divided(
            dataset, source, strategy, lambda data: feed._grouped(data), self._divided_by
        )

    def _grouped(self, dataset: Any) -> Any:
        """An iterator over groups of batches, if the model's steps run in XLA; else None."""
        rule = getattr(self._loop.function, "in_xla", None)
        if rule is None or self.steps_per_execution > 1:
            return None
        if self._in_xla is None:
            batches = self.steps_per_epoch or self._num_batches
            grouped = can_be_grouped(self._source, dataset)
            steps = batches * self._loop.epochs if batches and grouped else None
            self._in_xla = rule(steps, batch_size_of(self._source, dataset))
        if not self._in_xla:
            return None
        if self._groups is None or self._groups.dataset is not dataset:
            kept = getattr(self._loop.function, "output_bytes", 0)
            one_by_one = self._call_size.every_batch
            self._groups = Groups(self._source, dataset, one_by_one=one_by_one, output_bytes=kept)
        return iter(self._groups)

    # --- methods that Keras calls

    def reset(self) -> None:
        """As in Keras; also resets all counts."""
        super().reset()
        self._forget()

    def __iter__(self) -> Any:
        if self._prepared is None:
            if self._epochs == 0:
                self._source.start()
            self._prepared = 0, self._enumerate_iterator()
        self._first, self._epoch_iterator = self._prepared
        self._prepared = None
        self._done, self._running, self._ended_by_next = self._first, True, False
        self._loop.begin_epoch(self, self._epochs)
        self._loop.local.open()
        return self

    def __next__(self) -> Any:
        if not self._loop.begin_call():
            self._ended_by_next = True
            raise StopIteration
        self._note_call()
        if self._at_rest():
            self._pause()
        try:
            item = next(self._epoch_iterator)
        except StopIteration:
            self._ended_by_next = True
            self._end_epoch()
            raise
        if self._current_iterator is not self._reading:
            self._reading = self._current_iterator
            self._passes += 1
            self._digests = None
        steps = self.steps_per_execution if self._call is None else self._call.steps
        self._done = item[0] + steps
        self._batches += steps
        current_loop().iterator = item[-1]
        if keras_models.calls_have_two_numbers():
            return item
        first, last, iterator = item  # older versions give callbacks one number, before the call and after it
        return first if last == first else LastStep(first, lambda: last + 0), iterator

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """As in Keras, a context around an epoch's calls of the train function; ends the epoch."""
        with super().catch_stop_iteration():
            try:
                yield
                if not self._ended_by_next:  # Keras was told to stop
                    self._loop.stop_with_others(self)
            except (StopIteration, tf.errors.OutOfRangeError):
                # The train function found the end of the data: its call counts as one step, as in Keras.
                self._over = True
                if self._call is not None:
                    self._take_back(self._call.steps - 1)
                    self._call = None
                raise
            self._note_call()
        self._await_steps()
        if self._over:
            self._done = max(self._first, self._done - self.steps_per_execution)
            self._batches -= self.steps_per_execution
            self._pause()
            self._end_epoch()

    def _enumerate_iterator(self) -> Iterator[Any]:
        """An epoch's calls, as in Keras: the first step, the last step, and the iterator to read from."""
        self.data_adapter.on_epoch_begin()
        if self._current_iterator is None or not self.steps_per_epoch:
            self._current_iterator = iter(self._get_iterator())
            self._steps_seen = 0
        yield from self._calls(0)

    # --- what the workers compare

    def read(self) -> list[Any]:
        """What this worker has read: the number of batches, and what is known of the first ones."""
        return [self._batches, self._digests, self._own.facts()]

    def note_parts(self, parts: Any) -> None:
        """Notes a batch of data that is divided already: the parts of the replicas of this worker."""
        self._own.note(parts)

    def check_read(self, everyone: list[Any]) -> None:
        """Compares what each worker has read.

        Raises:
            DataError: the workers have read different batches.
        """
        counts, digests, own = zip(*everyone, strict=True)
        check_counts(counts)
        if all(digest is not None for digest in digests):
            check_first_batches(digests, tf_dataset(self._source.dataset))
        if self._layout is not None and self._passes == 1 and any(examples for examples, _ in own):
            check_own(own, self._layout)

    def _get_iterator(self) -> Any:
        self._made += 1
        self._source.begin(self._passes)
        # Batches that are read and dropped in a replay need not be divided.
        dropped = self._replayed is not None and self._made < self._replayed.made
        return self._source.dataset if dropped else self._distributed_dataset

    def _interrupted_warning(self) -> None:
        # During a replay, the warning was given by the interrupted run.
        if self._replayed is None:
            super()._interrupted_warning()

    # --- the calls of an epoch

    def _calls(self, first: int) -> Iterator[Any]:
        """The calls of an epoch, from the step `first` on."""
        total = self.steps_per_epoch or self._num_batches
        step = first
        while not total or step < total:
            if self._is_read_out():
                if self.steps_per_epoch:
                    self._interrupted_warning()
                break
            call = self._call = self._next_call(step, total)
            steps = self.steps_per_execution if call is None else call.steps
            self._steps_seen += steps
            last = step + steps - 1
            if call is None:
                yield step, last, self._current_iterator
            else:
                yield step, call.last_step(last), call
                steps -= call.unmade
            step += steps
        if self._is_read_out():
            self._current_iterator = iter(self._get_iterator())
            self._steps_seen = 0
        self.data_adapter.on_epoch_end()

    def _next_call(self, step: int, total: int | None) -> Call | None:
        """The next call; None if the function gets the iterator itself, for `steps_per_execution` steps."""
        iterator = self._current_iterator
        if not isinstance(iterator, split_datasets.SplitIterator | GroupIterator):
            return None
        if self.steps_per_execution > 1 or self._replayed is not None:
            return None
        predicts, grouped = self._loop.kind == "predict", isinstance(iterator, GroupIterator)
        if predicts and not grouped and not self._loop.every_batch:
            at_once = getattr(self._loop.function, "at_once", lambda iterator: 0)
            fits = (group := at_once(iterator)) and (not total or step + group <= total)
            return GroupCall(iterator, group) if fits else Call(iterator, 1)
        limits = [
            self._call_size.steps(round_begins=self._loop.local.round_begins),
            total - step if total else None,
            self._num_batches - self._steps_seen if self._num_batches else None,
            self._loop.session.max_steps(),
        ]
        steps = max(1, min(limit for limit in limits if limit is not None))
        make = GroupCall if predicts and grouped else Call
        return make(iterator, self._loop.local.fitting(steps))

    def _note_call(self) -> None:
        """Corrects the counts after the last call, which ran fewer steps than planned if the data ended."""
        call, self._call = self._call, None
        first = getattr(self._distributed_dataset, "first", None)
        if first is not None and self._digests is None and self._reading is not None:
            self._digests = first.digests()  # before the iterator of the next pass can read another one
        if call is not None and call.ran is not None:
            self._call_size.note(call)
            self._take_back(call.unmade)

    def _take_back(self, unmade: int) -> None:
        self._done -= unmade
        self._batches -= unmade
        self._steps_seen -= unmade

    def _pause(self) -> None:
        """Does what happens between two steps, such as saving a checkpoint."""
        events.emit(events.BetweenSteps(self._done))
        self._loop.session.between_steps(self, self._done)

    def _end_epoch(self) -> None:
        if self._running:
            self._epochs += 1
        self._running = self._over = False
        self._done = self._first = 0

    def _is_read_out(self) -> bool:
        return bool(self._num_batches) and self._num_batches <= self._steps_seen  # type: ignore[operator]

    def _at_rest(self) -> bool:
        """Whether the state is complete, so that a checkpoint can be saved."""
        return self._loop.local.savable

    def _await_steps(self) -> None:
        """Ends the epoch's steps: all replicas are equal then."""
        self._loop.local.close()

    # --- positions

    def position(self, *, ended: bool = False) -> dict[str, Any]:
        """The position of the next batch, as plain data for a checkpoint; must be called between two steps.

        Args:
            ended: whether the running epoch counts as ended, even if batches of it are left.
        """
        running = self._running and not ended
        steps, over = (self._done, self._over) if running else (0, False)
        # With `steps_per_epoch`, the next epoch continues with the last epoch's iterator.
        kept = bool(self.steps_per_epoch) and self._current_iterator is not None and self._steps_seen > 0
        position = DataPosition(
            epochs=self._epochs + (1 if self._running and ended else 0),
            steps=steps,
            over=over,
            passes=self._passes,
            taken=self._steps_seen - (self.steps_per_execution if over else 0),
            goes_on=not over and (steps > 0 or (kept and not self._is_read_out())),
            made=self._made,
            num_batches=self._num_batches,
            batches=self._batches,
        )
        return position.saved(self._source.state(), self._fingerprint)
