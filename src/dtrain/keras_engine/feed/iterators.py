"""Iterates over batches that are divided over the replicas; deletes its iterators in a thread.

`SplitDataset` gives an iterator for each pass over the data. How a batch is split is decided in `input.py`,
and what a pass holds by its source.

**Passes.** Making an iterator of TensorFlow's takes longer than a step of a small model, and an iterator of
one pass cannot read ahead into the next. So a source whose order is computed is read from one endless
iterator (`Passes`) as long as the passes are read in order, as in most trainings.

**Deleting.** An iterator of TensorFlow's that tunes its pipeline has a thread that sleeps between two checks
of the pipeline: 10 ms at first, twice as long each time, up to a minute. Deleting the iterator waits until
that thread ends. TensorFlow wakes the thread, but sets the flag to end only afterwards, so the thread may
sleep again until its next check. If iterators were not deleted in the background, an epoch of a second would
end with up to a second of waiting.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from dtrain.keras_engine.input import Split, packed, split_batch, split_of
from dtrain.keras_engine.input_advice import may_be_buffered
from dtrain.keras_engine.protocol import ReplicaLayout, own_split
from dtrain.log import logger

_LONGEST = 70.0  # seconds; the thread of TensorFlow's iterator sleeps for at most a minute

_ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


class SplitDataset:
    """Batches of a `tf.data.Dataset`, divided over the replicas of this process.

    Iterating gives `SplitIterator`s; with one replica, these have whole batches as their only parts.

    Args:
        dataset: yields global batches.
        layout: how the replicas are distributed.
        exact: whether the number of batches that Keras knows is certain.
        own: a `Passes` that reads only this process' part of the batches; None if there is none.
        grouped: with one replica, returns an iterator over groups of the batches, or None for one over
            single batches.

    Attributes:
        element_spec: the spec of a global batch.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        layout: ReplicaLayout,
        *,
        exact: bool = False,
        own: Any = None,
        grouped: Callable[[tf.data.Dataset], Any] = lambda dataset: None,
    ) -> None:
        self.element_spec = dataset.element_spec
        self._dataset = dataset
        self._whole = layout.replicas == 1
        self._grouped = grouped
        if own is None:
            own = dataset if self._whole else own_split(dataset, layout)
        self._parts = self._split(layout) if own is None else own
        self._exact = exact
        self._counted = exact or int(dataset.cardinality()) >= 0

    def _split(self, layout: ReplicaLayout) -> tf.data.Dataset:
        """The dataset for a process that reads whole batches, and splits each after reading it."""
        options = tf.data.Options()
        if layout.workers > 1:
            # All workers must see the same batches in the same order.
            options.deterministic = True
        dataset = self._dataset
        split = dataset.map(lambda *batch: tuple(split_batch(packed(batch, self.element_spec), layout)))
        split = split.with_options(options)
        return split.prefetch(tf.data.AUTOTUNE) if may_be_buffered(dataset) else split

    def __iter__(self) -> Any:
        groups = self._grouped(self._dataset) if self._whole else None
        return groups or SplitIterator(
            iter(self._parts), counted=self._counted, exact=self._exact, whole=self._whole
        )


class SplitIterator:
    """Iterates over the batches of one pass, as `Split`s.

    Args:
        iterator: TensorFlow's, or a `Pass`.
        counted, exact: as the attributes.
        whole: whether it yields whole batches, for the only replica.

    Attributes:
        counted: whether the number of batches was known beforehand.
        exact: whether that number is certain.
        whole: as given.
    """

    def __init__(self, iterator: Any, *, counted: bool, exact: bool = False, whole: bool = False) -> None:
        prepare()
        self._iterator = iterator
        self.counted = counted
        self.exact = exact
        self.whole = whole

    @property
    def element_spec(self) -> Any:
        """The spec of `(parts, total)`."""
        spec = self._iterator.element_spec
        return ((spec,), None) if self.whole else spec

    @property
    def left(self) -> int | None:
        """How many batches are left in the pass; None if only reading shows it."""
        return self._iterator.left if isinstance(self._iterator, Pass) else None

    @property
    def buffered(self) -> bool:
        """Whether batches come in buffers (`BatchBuffer`)."""
        return isinstance(self._iterator, Pass) and self._iterator.buffered

    def tensors(self) -> tuple[Any, BatchBuffer | None]:
        """TensorFlow's iterator, and the buffer whose batches come before it, or None.

        A caller that reads from them must call `note` afterwards.
        """
        return self._iterator.tensors() if isinstance(self._iterator, Pass) else (self._iterator, None)

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
        let_go(self.__dict__.pop("_iterator", None))


class Seekable(Protocol):
    """A source of batches whose next iterator can begin at any batch.

    Attributes:
        next: where the next iterator begins: the number of the pass, and the number of the batch in it.
        steps: the number of batches in a pass.
    """

    next: tuple[int, int]
    steps: int

    def set_next(self, number: int, first: int) -> None:
        """Makes the next iterator begin at the batch `first` of the pass `number`."""


class Passes:
    """Yields passes over a source, one per iteration.

    Args:
        source: decides where the next pass begins.
        make: makes an endless dataset, whose iterators begin where the last `source.set_next` says.
        each: the batches in one element of the dataset; the last element of a pass may have fewer.
        alike: whether all passes are equal, so that the iterator may continue with any of them.
        buffered: whether an element holds several batches of one pass, each leaf of shape (batches, ...),
            which are yielded one by one. Taking a batch from a buffer is much faster than reading one.

    Attributes:
        each, buffered: as given.
        buffer: the batches that were read and not yielded yet; None if not `buffered`.
    """

    def __init__(
        self,
        source: Seekable,
        make: Callable[[], tf.data.Dataset],
        *,
        each: int = 1,
        alike: bool = False,
        buffered: bool = False,
    ) -> None:
        self.each = each
        self.buffered = buffered
        self.buffer: BatchBuffer | None = None
        self._source = source
        self._make = make
        self._alike = alike
        self._iterator: Any = None
        self._next: tuple[int, int] | None = None  # the pass and the batch of the next read

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        """The dataset, made at the first read because making it is slow."""
        return self._make()

    @property
    def element_spec(self) -> Any:
        """The spec of what an iteration yields: a batch, or several if `each` is greater."""
        spec = self._dataset.element_spec
        return tf.nest.map_structure(_of_one, spec) if self.buffered else spec

    def __iter__(self) -> Pass:
        return Pass(self, *self._source.next, steps=self._source.steps)

    def at(self, position: tuple[int, int]) -> Any:
        """TensorFlow's iterator, whose next batch is the one at the position.

        The caller must pass the position after its last read batch to `left_at`. If batches are buffered,
        those in `buffer` come first.

        Args:
            position: the numbers of the pass and of the batch in it.
        """
        first = 1 if self._alike else 0  # with equal passes, only the batch number is compared
        if self._next is None or self._next[first:] != position[first:]:
            self._source.set_next(*position)
            self._iterator = iter(self._dataset)
            self.buffer = BatchBuffer.empty(self._dataset.element_spec) if self.buffered else None
        self._next = None
        return self._iterator

    def left_at(self, position: tuple[int, int]) -> None:
        """Notes the position up to which the iterator was read."""
        self._next = position


class Pass:
    """An iterator over one pass.

    Args:
        passes: the passes that it belongs to.
        number: the number of the pass.
        first: the batch to begin with.
        steps: the number of batches in a whole pass.

    Attributes:
        left: the number of batches that are left.
    """

    def __init__(self, passes: Passes, number: int, first: int, *, steps: int) -> None:
        self._of = passes
        self._number = number
        self._steps = steps
        self.left = steps - first

    @property
    def element_spec(self) -> Any:
        """As `Passes.element_spec`."""
        return self._of.element_spec

    @property
    def buffered(self) -> bool:
        """Whether its batches come in buffers."""
        return self._of.buffered

    def tensors(self) -> tuple[Any, BatchBuffer | None]:
        """TensorFlow's iterator, and the buffer to read before it, or None.

        The caller must pass the number of batches that it read, and the remaining buffer, to `note`.
        """
        iterator = self._of.at((self._number, self._steps - self.left))
        return iterator, self._of.buffer

    def note(self, batches: int, buffer: BatchBuffer | None = None) -> None:
        """Notes the number of batches that were read, and the buffer that remains."""
        self._of.buffer = buffer
        self.left -= batches
        next_one = (self._number, self._steps - self.left) if self.left else (self._number + 1, 0)
        self._of.left_at(next_one)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        iterator, buffer = self.tensors()
        if buffer is None:
            element = next(iterator)
        else:
            if not buffer.left():
                buffer = BatchBuffer.of(next(iterator))
            element, buffer = buffer.popped()
        self.note(min(self._of.each, self.left), buffer)
        return element


class BatchBuffer(NamedTuple):
    """Batches of one pass that were read together.

    Attributes:
        batches: a nest of tensors of shape (batches, ...).
        next: the index of the next batch, an int32 scalar.
    """

    batches: Any
    next: Any

    @classmethod
    def empty(cls, spec: Any) -> BatchBuffer:
        """An empty buffer for elements of this spec."""
        return cls.of(tf.nest.map_structure(_none_of, spec))

    @classmethod
    def of(cls, element: Any) -> BatchBuffer:
        """A buffer with all batches of an element."""
        return cls(element, tf.constant(0))

    @staticmethod
    def spec(spec: Any) -> BatchBuffer:
        """The specs of a buffer, from the spec of its element."""
        return BatchBuffer(spec, tf.TensorSpec([], tf.int32))

    def left(self) -> Any:
        """Whether there is a next batch, a bool scalar."""
        leaf = tf.nest.flatten(self.batches)[0]
        return self.next < (tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0])

    def popped(self) -> tuple[Any, BatchBuffer]:
        """The next batch, and the buffer without it."""
        batch = tf.nest.map_structure(lambda leaf: tf.gather(leaf, self.next), self.batches)
        return batch, BatchBuffer(self.batches, self.next + 1)


def _of_one(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _none_of(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)


def prepare() -> None:
    """Starts the thread that deletes iterators; must be called before the first `let_go`.

    The process ends only after all these iterators are deleted, or after `_LONGEST` seconds, because
    TensorFlow cannot shut down while an iterator exists.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_delete, name="dtrain-ended-iterators", daemon=True)
            _thread.start()
            atexit.register(_finish, _thread)


def let_go(iterator: Any) -> None:
    """Deletes an iterator in the background; may be called during garbage collection.

    Args:
        iterator: TensorFlow's iterator; the caller must keep no reference to it.
    """
    held = [iterator]
    del iterator  # the thread that drops the last reference waits for the deletion
    _ended.put(held)


def _delete() -> None:
    while (held := _ended.get()) is not None:
        held.clear()


def _finish(thread: threading.Thread) -> None:
    _ended.put(None)
    thread.join(_LONGEST)
    if thread.is_alive():
        logger.warning("An iterator over data does not end: something that it reads from is stuck.")
