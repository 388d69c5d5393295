"""Arrays as a source of batches, which can be read from any position of any epoch.

It fetches rows for each replica or for a global batch, one batch or many at a time. The order of the rows is
not computed here, but in `example_order.ArrayOrder`, and the datasets are made in `array_datasets.py`.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.engine.batches.batch_rows import (
    BatchParts,
    map_leaves,
    present_leaves,
    row_bytes,
)
from dtrain.engine.batches.example_order import LARGEST_SEED, ArrayOrder
from dtrain.engine.feed.array_datasets import ArrayBatches, ArrayDataset, drawn, traced
from dtrain.engine.feed.passes import BufferedPasses, Passes
from dtrain.engine.feed.position import DataPosition
from dtrain.engine.feed.row_reader import ArrayRows, RowReader, rows_between
from dtrain.engine.feed.same_examples import ArrayDigest, digest_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_adapters, tf_tracing, tf_variables

_READ_AHEAD = 8e6  # bytes of batches to read ahead
# This many batches, if they have at most this many bytes, are read together into a buffer.
_BATCHES_AT_ONCE = 32
_SMALL_BYTES = 2e6
_LARGE = 1 << 20  # bytes of an array that is copied once; smaller ones are copied as TensorFlow does
_ALIGNMENT = 64  # bytes, of the memory that TensorFlow takes over without a copy
_LARGEST_KEPT = 1 << 29  # bytes of a copy whose memory is kept between two fits
_KEPT_ROWS = 1 << 20  # of an order that is kept between two fits
_UNUSED = 3  # the references to memory that no tensor uses: of `_kept`, of `_memory_for`, of `getrefcount`
_kept: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}  # by the id of the array that was copied
_kept_lock = threading.Lock()
_SHARED_TYPES = frozenset(
    np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip


class ArraySource:
    """The batches that Keras makes of arrays.

    With a global seed (`keras.utils.set_random_seed`) this source has the same order in every epoch, as Keras
    does. Without one, each epoch has another order.

    Args:
        adapter: Keras' data adapter.
        layout: how the replicas are distributed; None under TensorFlow's own strategies.

    Attributes:
        kind, counted, dataset: as of a `Source`.
        batch: the examples in a batch; the last batch of a pass may have fewer.
        next: where the next iterator begins: the number of the pass, and the number of the batch in it.
        steps: the number of batches in a pass.
        least_rows: the examples in the smallest batch.
    """

    kind = "arrays"
    counted = True

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._rows, self.batch, self._shuffle = keras_adapters.array_facts(adapter)
        self.least_rows = self._rows % self.batch or min(self._rows, self.batch)
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = tf_variables.unnamed_variable_handle(tf.int64, [4])
        self._values = map_leaves(_tensor, keras_adapters.arrays_of(adapter))
        self._leaves = present_leaves(self._values)
        self._dense = all(isinstance(leaf, tf.Tensor) for leaf in self._leaves)
        self._take_order(*self._choose_seed(layout))
        self.steps = self._order.steps

    def _choose_seed(self, layout: ReplicaLayout | None) -> tuple[tuple[int, int], bool]:
        """The two numbers of the order's seed, and whether each epoch has the same order."""
        drawn = secrets.randbits(31), secrets.randbits(31)
        if self._shuffle and layout is not None:
            # All workers must see the same batches.
            drawn = exchange(layout, drawn)[0]
        seed = tf_tracing.global_seed()
        if seed is None:
            return drawn, False
        first = seed % LARGEST_SEED
        # TensorFlow seeds the first random operation of a function like this; (0, 0) would mean no seed.
        return (first, 0 if first else LARGEST_SEED), True

    def _take_order(self, seed: tuple[int, int], fixed: bool) -> None:
        self._seed, self._fixed = seed, fixed
        self._array_rows: ArrayRows | None = None  # what `rows` reads from; None until the first read
        self._order = ArrayOrder(self._rows, self.batch, self._shuffle, seed if fixed else ())
        self.set_next(0, 0)
        self.dataset = ArrayDataset(self._maker("whole", ahead=self._ahead()), self._batch_spec())

    def _batch_spec(self) -> Any:
        """The spec of a batch; None if only the dataset shows it, as for sparse arrays."""
        if not self._dense:
            return None
        rows = self.batch if self._rows % self.batch == 0 else None
        return map_leaves(lambda leaf: tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype), self._values)

    def _maker(self, kind: str, **facts: Any) -> Callable[[], tf.data.Dataset]:
        """Makes a dataset of these arrays; the arguments are a method of `ArrayBatches`, and its attributes.

        It does not refer to the source: a cycle would keep the arrays into the next `fit`.
        """
        batches = ArrayBatches(order=self._order, **facts)
        values, handle, dense = self._values, self._handle, self._dense

        def make() -> tf.data.Dataset:
            # Sparse arrays may be in classes of Keras' own, which a traced function does not accept.
            function = getattr(batches, kind)
            with tf.init_scope(), tf.device("CPU:0"):
                if dense:
                    specs = str(tf.nest.map_structure(lambda leaf: (leaf.shape, leaf.dtype), values))
                    function = traced(batches, kind, specs).get_concrete_function(values, handle)
                return function(values, handle)

        return make

    def digest(self) -> ArrayDigest | None:
        """The digest of the arrays, the same on every worker that has the same; None for sparse ones."""
        return digest_of(self._leaves, self._rows)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return {"examples": self._rows, "the batch size": self.batch, "shuffle": self._shuffle}

    def start(self) -> None:
        """Nothing to do."""

    def begin(self, number: int) -> None:
        """As `Source.begin`."""
        self.set_next(number, 0)

    def state(self) -> dict[str, Any]:
        """As `Source.state`."""
        return {"seed": self._seed, "fixed": self._fixed} if self._shuffle else {}

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[Any]:
        """As `Source.open`; replaces `dataset` if the position was saved with another seed."""
        if self._shuffle:
            first, second = state["seed"]
            order = (first, second), bool(state["fixed"])
            if order != (self._seed, self._fixed):
                self._take_order(*order)
        self.set_next(position.passes - 1, position.taken)
        yield self.dataset

    def set_next(self, number: int, first: int) -> None:
        """Makes the next iterator begin at the batch `first` of the pass `number`."""
        self.next = number, first
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.constant([number, first, *self._seed], tf.int64)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def in_groups(self, batches: int) -> BufferedPasses | None:
        """Passes of which the rows of up to `batches` batches are read together, for one replica.

        None if the order is drawn batch by batch.
        """
        if self._order.one_by_one:
            return None
        reader = self._reader(BatchParts(), batches, flat=True)
        return BufferedPasses(self, self._rows_to_read, reader, alike=self._order.same_each_pass)

    def passes(self, layout: ReplicaLayout, at_once: int = _BATCHES_AT_ONCE) -> Passes | None:
        """Passes over this process' part of each batch, as elements of a `SplitDataset`.

        Args:
            layout: how the replicas are distributed; with one replica, elements are whole batches.
            at_once: the batches that are read together, if they are small.

        Returns:
            The passes; None if the order has no random access, or an array is not a dense tensor.
        """
        if not (self._order.random_access and self._dense):
            return None
        parts = BatchParts(layout.replicas, layout.first_replica, layout.local_replicas)
        alike = self._order.same_each_pass
        if not self._order.one_by_one and self._can_be_buffered(layout, at_once):
            return BufferedPasses(self, self._rows_to_read, self._reader(parts, at_once), alike=alike)
        return Passes(self, self._maker("by_one", parts=parts, ahead=self._ahead()), alike=alike)

    @property
    def reads_rows(self) -> bool:
        """Whether `rows` can read batches: of dense arrays, unless each batch is shuffled by itself."""
        return self._dense and not self._order.one_by_one

    @property
    def at_once(self) -> int:
        """How many batches are small enough to be read together; 0 if one is too large, or has strings."""
        if any(leaf.dtype == tf.string for leaf in self._leaves):
            return 0  # the bytes of strings are not known
        return int(_SMALL_BYTES // max(1, self._bytes_of_batch()))

    def sizes(self, first: int, count: int) -> list[int]:
        """The rows of each of `count` consecutive batches of a pass, from the batch `first` on."""
        low, high = first * self.batch, min((first + count) * self.batch, self._rows)
        return [min(self.batch, high - start) for start in range(low, high, self.batch)]

    def rows(self, number: int, first: int, count: int) -> Any:
        """Reads consecutive batches of a pass at once, without an iterator of TensorFlow's.

        Args:
            number: the number of the pass.
            first: the number of the first batch.
            count: how many batches; all must be in the pass.

        Returns:
            A nest of tensors of shape (rows of all batches, ...).
        """
        low = first * self.batch
        high = low + sum(self.sizes(first, count))
        if self._array_rows is None:
            self._array_rows = self._rows_to_read()
        read = rows_between(self._reader(BatchParts(), 1))
        with tf.device("CPU:0"):
            return read(self._array_rows, *(tf.constant(value, tf.int64) for value in (number, low, high)))

    def _rows_to_read(self) -> ArrayRows:
        """What a `RowReader` reads from."""
        with tf.init_scope(), tf.device("CPU:0"):
            begun = tf.constant(self._seed, tf.int64)
            if self._order.drawn:
                draw = drawn if self._rows <= _KEPT_ROWS else drawn.__wrapped__
                begun = draw(self._order)
            return ArrayRows(self._values, begun, tf.constant(self._rows, tf.int64))

    def _reader(self, parts: BatchParts, at_once: int, *, flat: bool = False) -> RowReader:
        # One function serves for any number of rows and any seed.
        order = replace(self._order, rows=0, fixed=(0, 0) if self._fixed else ())
        return RowReader(order, parts, at_once, even=self._rows % self.batch == 0, flat=flat)

    def _can_be_buffered(self, layout: ReplicaLayout, at_once: int) -> bool:
        """Whether reading many batches at a time is possible and faster.

        No replica's part may be empty, because `permute` needs at least one place. On a GPU or TPU, a loop
        could copy the whole buffer to the device at each step.
        """
        smallest = self._rows % self.batch or min(self._rows, self.batch)
        # The bytes of strings are not known.
        sized = all(leaf is not None and leaf.dtype != tf.string for leaf in tf.nest.flatten(self._values))
        small = self._bytes_of_batch() * at_once <= _SMALL_BYTES
        on_cpu = not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))
        return small and sized and on_cpu and smallest >= layout.replicas

    def _ahead(self) -> int:
        """The number of batches to read ahead, by their size: from 2 to 32."""
        if not self._dense:
            return 2  # the bytes of a batch are not known
        return max(2, min(32, int(_READ_AHEAD // max(1, self._bytes_of_batch()))))

    def _bytes_of_batch(self) -> int:
        return self.batch * sum(row_bytes(leaf) for leaf in self._leaves if isinstance(leaf, tf.Tensor))


def _tensor(leaf: Any) -> Any:
    """Copies an array to a tensor, so that later writes into the array reach no batch; returns other leaves.

    `tf.convert_to_tensor` copies an array twice, unless the first copy happens to be aligned for TensorFlow.
    For a large array that takes twice the memory, and most of the time at the start of a `fit`.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.nbytes < _LARGE or leaf.dtype not in _SHARED_TYPES:
        return tf.convert_to_tensor(leaf)
    memory = _memory_for(leaf)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = np.ndarray(leaf.shape, leaf.dtype, memory, start)
    np.copyto(copy, leaf)
    return tf.experimental.dlpack.from_dlpack(copy.__dlpack__())


def _memory_for(leaf: np.ndarray) -> np.ndarray:
    """Memory for an aligned copy of an array, which is kept as long as the array lives.

    Mapping new pages takes many times as long as copying, so the next `fit` of the same array gets the memory
    of the one before, if no tensor uses it any more: each tensor holds a reference to it.
    """
    key = id(leaf)
    with _kept_lock:
        kept = _kept.get(key)
        if kept is not None and kept[0]() is leaf:
            memory = kept[1]
            if sys.getrefcount(memory) == _UNUSED:
                return memory
    memory = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
    if leaf.nbytes <= _LARGEST_KEPT:
        _kept[key] = (weakref.ref(leaf, lambda _: _kept.pop(key, None)), memory)
    return memory
