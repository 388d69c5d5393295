"""Epochs that know their place in the data, and can begin at one: a part of the iterator that `fit` is given.

It adds to Keras' own iterator of epochs, and counts as that does. How a source of batches finds a place is
`positions.py`'s and the sources'.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dtrain.errors import DataError
from dtrain.keras_engine.blocks import Blocks, Call, LastStep
from dtrain.keras_engine.positions import Place, Source, place_of, position_of
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

# Keras' iterator, which stands behind this one among the bases of a class, is not known to type checkers.
_Base: Any = object


class PlacedEpochs(_Base):  # type: ignore[misc]
    """To be put before Keras' iterator of epochs.

    Attributes:
        between_steps: called as `between_steps(iterator, done)` before each call of the train function, when
            `done` batches of the epoch are done, and after the last. The call that finds the end of data of
            unknown length comes between two calls with the same number.
        room: called as `room()`: how many steps may be made before `between_steps` must be called; None for
            any number.
    """

    between_steps: Callable[[Any, int], None] | None = None
    room: Callable[[], int | None] | None = None

    # Of Keras' iterator:
    data_adapter: Any
    steps_per_epoch: int | None
    steps_per_execution: int
    _num_batches: int | None
    _steps_seen: int
    _current_iterator: Any
    _epoch_iterator: Any

    # Set by the class that this is a part of:
    _blocks: Blocks
    _source: Source
    _fingerprint: dict[str, Any]
    _distributed_dataset: Any

    # What has been read:
    _epochs: int  # that have ended
    _first: int  # the step that the running epoch began with
    _done: int  # the step that comes next
    _running: bool  # whether an epoch has begun and not ended
    _over: bool  # whether it has found the end of the data
    _passes: int  # over the data that were begun
    _made: int  # iterators over the data, also those from which nothing was read
    _made_by_then: int  # those to be made until the place to which all is read again
    _batches: int  # of all epochs
    _reading: Any  # the last iterator from which something was read
    _prepared: tuple[int, Iterator[Any]] | None  # the next epoch, if it is not to be begun by itself
    _call: Call | None  # the last call, until what it did is noted
    _reading_again: bool  # whether batches are read one by one, only to be thrown away

    def _divided(self, dataset: Any, *, check: bool = False) -> Any:
        raise NotImplementedError

    # --- what Keras calls

    def reset(self) -> None:
        """As Keras'; nothing counts as read."""
        super().reset()
        self._forget()

    def __iter__(self) -> Any:
        if self._prepared is None:
            if self._epochs == 0:
                self._source.starting()
            self._prepared = 0, self._enumerate_iterator()
        self._first, self._epoch_iterator = self._prepared
        self._prepared = None
        self._done, self._running = self._first, True
        return self

    def __next__(self) -> Any:
        self._note_call()
        if self.between_steps is not None and self._at_rest():
            self.between_steps(self, self._done)
        try:
            item = next(self._epoch_iterator)
        except StopIteration:
            self._end_epoch()
            raise
        if item[2] is not self._reading:
            self._reading = item[2]
            self._passes += 1
        steps = self.steps_per_execution if self._call is None else self._call.steps
        self._done = item[0] + steps
        self._batches += steps
        return item

    def _enumerate_iterator(self) -> Iterator[Any]:
        """An epoch's calls, as Keras': the first step, the last, and the iterator to read from."""
        self.data_adapter.on_epoch_begin()
        if self._current_iterator is None or not self.steps_per_epoch:
            self._current_iterator = iter(self._get_iterator())
            self._steps_seen = 0
        yield from self._calls(0)

    def _calls(self, first: int) -> Iterator[Any]:
        """The calls of an epoch from a step on."""
        total = self.steps_per_epoch or self._num_batches
        step = first
        while not total or step < total:
            if self._is_read_out():
                if self.steps_per_epoch:
                    self._interrupted_warning()
                break
            steps = self._steps_of_call(step, total)
            self._steps_seen += steps
            last: int = step + steps - 1
            if self._call is not None:
                last = last if self._call.steps == 1 else LastStep(last, self._call)
            call = self._call
            yield step, last, self._current_iterator
            step += steps if call is None else steps - call.unmade
        if self._is_read_out():
            self._current_iterator = iter(self._get_iterator())
            self._steps_seen = 0
        self.data_adapter.on_epoch_end()

    def _steps_of_call(self, step: int, total: int | None) -> int:
        """How many steps the next call makes; its iterator is told."""
        self._call = None
        if self.steps_per_execution > 1 or self._reading_again:
            return self.steps_per_execution
        if not hasattr(self._current_iterator, "call"):
            return 1
        limits = [
            self._blocks.steps(),
            total - step if total else None,
            self._num_batches - self._steps_seen if self._num_batches else None,
            None if self.room is None else self.room(),
        ]
        self._call = Call(max(1, min(limit for limit in limits if limit is not None)))
        self._current_iterator.call = self._call
        return self._call.steps

    def _note_call(self) -> None:
        """What the last call did, which is less than it was to where the data ended."""
        call, self._call = self._call, None
        if call is not None and call.ran is not None:
            self._blocks.note(call)
            self._forget_steps(call.unmade)

    def _forget_steps(self, unmade: int) -> None:
        self._done -= unmade
        self._batches -= unmade
        self._steps_seen -= unmade

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """As Keras': around an epoch's calls of the train function."""
        with super().catch_stop_iteration():
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                # The train function found the end: that call counts for one, as Keras' do.
                self._over = True
                if self._call is not None:
                    self._forget_steps(self._call.steps - 1)
                    self._call = None
                raise
            self._note_call()
        self._await_steps()
        if self._over:
            self._done = max(self._first, self._done - self.steps_per_execution)
            self._batches -= self.steps_per_execution
            if self.between_steps is not None:
                self.between_steps(self, self._done)
            self._end_epoch()

    def _get_iterator(self) -> Any:
        self._made += 1
        self._source.begin(self._passes)
        # What is read only to be thrown away need not be divided.
        return self._source.dataset if self._made < self._made_by_then else self._distributed_dataset

    # --- for the asynchronous kind

    def _at_rest(self) -> bool:
        """Whether all that was read was taken by calls that are done."""
        return True

    def _await_steps(self) -> None:
        """Waits for the epoch's steps."""

    # --- places

    def position(self, *, ended: bool = False) -> dict[str, Any]:
        """Where the next batch will come from, as plain data; to be called between two steps.

        Args:
            ended: the running epoch, if there is one, counts as over, whatever is left of it.
        """
        running = self._running and not ended
        steps, over = (self._done, self._over) if running else (0, False)
        taken = self._steps_seen - (self.steps_per_execution if over else 0)
        goes_on = not over and (steps > 0 or self._kept_iterator_is_begun())
        place = Place(
            epochs=self._epochs + (1 if self._running and ended else 0),
            steps=steps,
            over=over,
            passes=self._passes,
            taken=taken,
            goes_on=goes_on,
            made=self._made,
            num_batches=self._num_batches,
            batches=self._batches,
        )
        return position_of(place, self._source, self._fingerprint)

    def go_to(self, position: dict[str, Any]) -> None:
        """Has the next epoch, or the one that has begun but has read nothing, go on at a position.

        Raises:
            DataError: the position is one in other data.
        """
        if self._batches:
            raise RuntimeError("go_to was called after training had begun")
        place = place_of(position, self._fingerprint)
        self._epochs = place.epochs
        if self._source.computed:
            steps = self._begin_at(place, position["source"])
        else:
            self._source.go_to(position["source"], place)
            steps = self._read_to(place)
        self._passes, self._made, self._batches = place.passes, place.made, place.batches
        if self._running:
            self._epoch_iterator = steps
            self._first = self._done = place.steps
        else:
            self._prepared = place.steps, steps

    def _kept_iterator_is_begun(self) -> bool:
        """Whether the next epoch goes on with the iterator of the last."""
        if not self.steps_per_epoch or self._current_iterator is None or self._steps_seen == 0:
            return False
        return not self._num_batches or self._steps_seen < self._num_batches

    def _begin_at(self, place: Place, state: dict[str, Any]) -> Iterator[Any]:
        """The batches of the epoch from a place on, where that can be computed."""
        source, before = self._source, self._source.dataset
        source.go_to(state, place)
        if source.dataset is not before:
            self._distributed_dataset = self._divided(source.dataset)
        self._num_batches, self._passes = place.num_batches, place.passes
        self._steps_seen = place.taken if place.goes_on else 0
        self._current_iterator = None
        if place.steps and not place.over:
            self.data_adapter.on_epoch_begin()
        if place.goes_on and not self._is_read_out():
            rest = source.rest(place)
            divided = self._distributed_dataset if rest is source.dataset else self._divided(rest)
            self._current_iterator = self._reading = iter(divided)
        source.settle()
        if place.over:
            return iter(())
        return self._calls(place.steps) if place.steps else self._enumerate_iterator()

    def _is_read_out(self) -> bool:
        total = self._num_batches
        return total is not None and 0 < total <= self._steps_seen

    def _read_to(self, place: Place) -> Iterator[Any]:
        """The same, where all before must be read once more, in the same order."""
        logger.info(
            "%s cannot begin elsewhere than at its beginning: it is replayed; %d batches are read again.",
            self._source.kind.capitalize(),
            place.batches,
        )
        begun = time.monotonic()
        self._made_by_then = place.made
        self._reading_again = True
        self._interrupted_warning: Callable[[], None] = _silent
        try:
            for _ in range(place.whole_epochs):
                self._read_epoch()
            steps: Iterator[Any] = iter(()) if place.over else self._enumerate_iterator()
            for _ in range(0, place.steps if not place.over else 0, self.steps_per_execution):
                self._read(next(steps)[2])
        except (StopIteration, tf.errors.OutOfRangeError):
            raise DataError(
                f"{self._source.kind.capitalize()} ended before the place where the checkpoint was written.",
                hint="Give fit the same data as before.",
            ) from None
        finally:
            self._made_by_then = 0
            self._reading_again = False
            del self._interrupted_warning
        logger.info("Read again in %.1f s.", time.monotonic() - begun)
        return steps

    def _read_epoch(self) -> None:
        """Reads an epoch as a fit would."""
        with upstream_keras.epoch_iterator_base().catch_stop_iteration(self):
            for _, _, iterator in self._enumerate_iterator():
                try:
                    self._read(iterator)
                except tf.errors.OutOfRangeError:
                    raise StopIteration from None

    def _read(self, iterator: Any) -> None:
        """Reads what one call of the train function would; raises where that would find the end."""
        self._reading = iterator
        next(iterator)
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            for _ in range(self.steps_per_execution - 1):
                next(iterator)

    def _end_epoch(self) -> None:
        if self._running:
            self._epochs += 1
        self._running = self._over = False
        self._done = self._first = 0

    def _forget(self) -> None:
        """Nothing has been read."""
        self._epochs = self._done = self._first = self._passes = self._made = self._batches = 0
        self._made_by_then = 0
        self._running = self._over = False
        self._reading = None
        self._prepared = None
        self._call = None
        self._reading_again = False


def _silent() -> None:
    """The warning was given when the data was read for the first time."""
