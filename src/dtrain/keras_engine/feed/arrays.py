"""Arrays as a source of batches, read from any position of any epoch.

`example_order.ArrayOrder` computes the order; here rows are fetched in it, for each replica or for a whole
batch, one batch or many at a time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.example_order import LARGEST_SEED, ArrayOrder
from dtrain.keras_engine.feed.passes import Passes
from dtrain.keras_engine.feed.position import DataPosition
from dtrain.keras_engine.input import bounds, map_leaves, present_leaves, row_bytes, unconverted
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import tensorflow as upstream_tf

_READ_AHEAD = 8e6  # bytes of batches
# If so many batches have no more bytes than that, they are read together and copied one by one.
_BATCHES_AT_ONCE = 32
_SMALL_BYTES = 2e6


class ArraySource:
    """The batches that Keras makes of arrays.

    With a global seed (`keras.utils.set_random_seed`) Keras draws the same order in every epoch, and so does
    this source. Without one each epoch has another order.

    Args:
        adapter: Keras' adapter.
        layout: how the replicas are spread; None under TensorFlow's own strategies.

    Attributes:
        kind, counted, dataset: as of a `Source`.
        batch: examples in a batch; the last may have fewer.
        next: the number of the pass that begins next, and its first batch.
        steps: batches in a pass.
    """

    kind = "arrays"
    counted = True

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._rows, self.batch, self._shuffle = upstream_data.array_facts(adapter)
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = upstream_tf.unnamed_variable_handle(tf.int64, [2])
        self.set_next(0, 0)
        self._values = map_leaves(_tensor, upstream_data.arrays_of(adapter))
        self._leaves = present_leaves(self._values)
        self._dense = all(isinstance(leaf, tf.Tensor) for leaf in self._leaves)
        self._take_order(*self._choose_seed(layout))
        self.steps = self._order.steps

    def _choose_seed(self, layout: ReplicaLayout | None) -> tuple[tuple[int, int], bool]:
        """Two numbers, and whether each epoch has the same order."""
        drawn = secrets.randbits(31), secrets.randbits(31)
        if self._shuffle and layout is not None:
            # All workers must see the same batches.
            drawn = exchange(layout, drawn)[0]
        found = upstream_tf.global_seed()
        if found is None:
            return drawn, False
        first = found % LARGEST_SEED
        # As TensorFlow seeds the first random operation of a function; twice zero would be no seed.
        return (first, 0 if first else LARGEST_SEED), True

    def _take_order(self, seed: tuple[int, int], fixed: bool) -> None:
        self._seed, self._fixed = seed, fixed
        self._order = ArrayOrder(self._rows, self.batch, self._shuffle, seed, fixed=fixed)
        self.dataset = self._whole_batches()

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
        """As `Source.open`; `dataset` is another one if the seed was."""
        if self._shuffle:
            first, second = state["seed"]
            found = (first, second), bool(state["fixed"])
            if found != (self._seed, self._fixed):
                self._take_order(*found)
        self.set_next(position.passes - 1, position.taken)
        yield self.dataset

    def set_next(self, number: int, first: int) -> None:
        """The next iterator begins pass `number` at the batch `first`."""
        self.next = number, first
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.constant([number, first], tf.int64)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def _begun(self, _: Any) -> Any:
        """Where an iterator begins, and the order of its pass if Keras draws that at once."""
        position = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64), [2])
        return position, self._order.drawn()

    def _whole_batches(self) -> tf.data.Dataset:
        """The global batches as Keras makes them, from the next position to the end of that pass."""
        begun = tf.data.Dataset.range(1).map(unconverted(self._begun)).prefetch(1)
        rows = begun.flat_map(
            unconverted(lambda position, drawn: self._order.batches(position[0], position[1], drawn))
        )
        arrays = tf.data.Dataset.from_tensors(self._values).repeat()
        batches = tf.data.Dataset.zip((rows, arrays)).map(
            unconverted(lambda rows, arrays: upstream_data.some_rows(arrays, rows)),
            num_parallel_calls=2,
            deterministic=True,
        )
        return batches.with_options(_options()).prefetch(self._ahead())

    def in_groups(self, batches: int) -> Passes | None:
        """The rows of so many batches at a time; None if each batch is drawn by itself."""
        if self._order.one_by_one:
            return None

        def groups(position: Any, drawn: Any) -> tf.data.Dataset:
            of_first = -(-(self.steps - position[1]) // batches)
            of_pass = -(-self.steps // batches)

            def rows(group: Any) -> Any:
                number, first = _position_of_group(group, batches, position, of_first, of_pass)
                places = self._order.places(first, batches)
                return self._fetched(places, first, number, drawn)

            return _endless().map(unconverted(rows))

        return self._passes(groups, ahead=2, each=batches)

    def passes(self, layout: ReplicaLayout) -> Passes | None:
        """Only this process' part of each batch, in the form of a `SplitDataset`; None if that is impossible.

        Args:
            layout: how the replicas are spread; an only replica gets whole batches.
        """
        if not (self._order.random_access and self._dense):
            return None
        if not self._order.one_by_one and self._can_be_buffered(layout):
            return self._passes(lambda *begun: self._by_many(layout, *begun), ahead=2, buffered=True)
        return self._passes(lambda *begun: self._by_one(layout, *begun), ahead=self._ahead())

    def _passes(
        self,
        made: Callable[[Any, Any], tf.data.Dataset],
        *,
        ahead: int,
        each: int = 1,
        buffered: bool = False,
    ) -> Passes:
        """Passes over what is made of a position and a drawn order whenever an iterator begins."""

        def make() -> tf.data.Dataset:
            # In one function: making an iterator takes milliseconds for each function.
            begun = tf.data.Dataset.range(1).flat_map(unconverted(lambda _: made(*self._begun(_))))
            return begun.with_options(_options()).prefetch(ahead)

        return Passes(self, make, each=each, alike=self._order.same_each_pass, buffered=buffered)

    def _fetched(self, places: Any, step: Any, number: Any, drawn: Any) -> Any:
        return upstream_data.some_rows(self._values, self._order.rows_at(places, step, number, drawn))

    def _can_be_buffered(self, layout: ReplicaLayout) -> bool:
        """Whether reading many batches at a time is faster, and possible.

        No part may be empty: `permute` needs a place. A loop on another device than the CPU could copy a
        whole buffer there at each step.
        """
        smallest = self._rows % self.batch or min(self._rows, self.batch)
        # The length of texts is not known.
        sized = all(leaf is not None and leaf.dtype != tf.string for leaf in tf.nest.flatten(self._values))
        small = self._bytes_of_batch() * _BATCHES_AT_ONCE <= _SMALL_BYTES
        on_cpu = not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))
        return small and sized and on_cpu and smallest >= layout.replicas

    def _by_one(self, layout: ReplicaLayout, position: Any, drawn: Any) -> tf.data.Dataset:
        """The parts of the batches, one batch at a time."""
        even = self._rows % self.batch == 0

        def one(later: Any) -> Any:
            later += position[1]
            step, number = later % self.steps, position[0] + later // self.steps
            start = step * self.batch
            size = self.batch if even else tf.minimum(tf.constant(self.batch, tf.int64), self._rows - start)
            parts = []
            for low, high in _bounds_of_parts(size, layout):
                # One place too many, which is dropped again: `permute` needs at least one.
                places = tf.minimum(start + tf.range(low, high + 1, dtype=tf.int64), start + size - 1)
                rows = self._order.rows_at(places, step, number, drawn)[:-1]
                parts.append(upstream_data.some_rows(self._values, rows))
            return parts[0] if layout.replicas == 1 else (tuple(parts), tf.cast(size, tf.int32))

        return _endless().map(unconverted(one))

    def _by_many(self, layout: ReplicaLayout, position: Any, drawn: Any) -> tf.data.Dataset:
        """The parts of several batches of one size at a time: each leaf of shape (batches, rows, ...)."""
        full, rest = divmod(self._rows, self.batch)

        def groups_from(first: Any) -> Any:
            return -(-tf.maximum(full - first, 0) // _BATCHES_AT_ONCE) + (1 if rest else 0)

        of_first, of_pass = groups_from(position[1]), groups_from(tf.zeros([], tf.int64))

        def some(group: Any) -> Any:
            number, first = _position_of_group(group, _BATCHES_AT_ONCE, position, of_first, of_pass)
            first = tf.minimum(first, full)
            count = tf.minimum(tf.constant(_BATCHES_AT_ONCE, tf.int64), full - first)
            size: Any = self.batch
            if rest:
                last = first >= full
                count = tf.where(last, tf.constant(1, tf.int64), count)
                size = tf.where(last, tf.constant(rest, tf.int64), self.batch)
            starts = (first + tf.range(count))[:, tf.newaxis] * self.batch

            def part(low: Any, high: Any) -> Any:
                places = tf.reshape(starts + tf.range(low, high, dtype=tf.int64), [-1])
                rows = self._fetched(places, first, number, drawn)
                return map_leaves(lambda leaf: _in_batches(leaf, count, high - low), rows)

            parts = [part(*each) for each in _bounds_of_parts(size, layout)]
            if layout.replicas == 1:
                return parts[0]
            return tuple(parts), tf.fill(tf.expand_dims(count, 0), tf.cast(size, tf.int32))

        return _endless().map(unconverted(some))

    def _ahead(self) -> int:
        """Batches to read ahead: as many as the threads that share a core should compute at a time."""
        if not self._dense:
            return 2  # of unknown size
        return max(2, min(32, int(_READ_AHEAD // max(1, self._bytes_of_batch()))))

    def _bytes_of_batch(self) -> int:
        return self.batch * sum(row_bytes(leaf) for leaf in self._leaves if isinstance(leaf, tf.Tensor))


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _options() -> tf.data.Options:
    options = tf.data.Options()
    # Rewriting the graph, which holds the arrays, takes longer than it saves.
    options.experimental_optimization.apply_default_optimizations = False
    # Nothing needs tuning, and an iterator that tunes its pipeline is slow to end (`ended_iterators.py`).
    options.autotune.enabled = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


def _position_of_group(
    group: Any, batches: int, position: Any, of_first: Any, of_pass: Any
) -> tuple[Any, Any]:
    """The number of a group's pass, and of its first batch in that pass.

    Args:
        group: its number, counted from the position on.
        batches: in a group.
        position: where the first pass begins; the others begin with their first batch.
        of_first, of_pass: groups of the first pass, and of every other one.
    """
    later = group - of_first
    number = tf.where(later < 0, position[0], position[0] + 1 + later // of_pass)
    first = tf.where(later < 0, position[1] + group * batches, later % of_pass * batches)
    return number, first


def _bounds_of_parts(rows: Any, layout: ReplicaLayout) -> list[tuple[Any, Any]]:
    first = layout.first_replica
    return [bounds(rows, r, layout.replicas) for r in range(first, first + layout.local_replicas)]


def _in_batches(rows: Any, batches: Any, size: Any) -> Any:
    """The rows of some batches as a leaf of shape (batches, size, ...)."""
    known = tf.cast(tf.stack([batches, size]), tf.int64)
    shaped = tf.reshape(rows, tf.concat([known, tf.shape(rows, tf.int64)[1:]], axis=0))
    return tf.ensure_shape(shaped, [None, size if isinstance(size, int) else None, *rows.shape[1:]])


def _endless() -> tf.data.Dataset:
    return tf.data.Dataset.range(tf.int64.max)
