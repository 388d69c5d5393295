"""Arrays as a source of batches, which can be read from any position of any epoch.

It fetches rows for each replica or for a global batch, one batch or many at a time. The order of the rows is
not computed here, but in `example_order.ArrayOrder`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.example_order import LARGEST_SEED, ArrayOrder
from dtrain.keras_engine.feed.iterators import Passes
from dtrain.keras_engine.feed.position import DataPosition
from dtrain.keras_engine.input import bounds, map_leaves, present_leaves, row_bytes, unconverted
from dtrain.keras_engine.peer_exchange import exchange
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import tensorflow as upstream_tf

_READ_AHEAD = 8e6  # bytes of batches to read ahead
# This many batches, if they have at most this many bytes, are read together into a buffer.
_BATCHES_AT_ONCE = 32
_SMALL_BYTES = 2e6


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
        """The two numbers of the order's seed, and whether each epoch has the same order."""
        drawn = secrets.randbits(31), secrets.randbits(31)
        if self._shuffle and layout is not None:
            # All workers must see the same batches.
            drawn = exchange(layout, drawn)[0]
        found = upstream_tf.global_seed()
        if found is None:
            return drawn, False
        first = found % LARGEST_SEED
        # TensorFlow seeds the first random operation of a function like this; (0, 0) would mean no seed.
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
        """As `Source.open`; replaces `dataset` if the position was saved with another seed."""
        if self._shuffle:
            first, second = state["seed"]
            found = (first, second), bool(state["fixed"])
            if found != (self._seed, self._fixed):
                self._take_order(*found)
        self.set_next(position.passes - 1, position.taken)
        yield self.dataset

    def set_next(self, number: int, first: int) -> None:
        """Makes the next iterator begin at the batch `first` of the pass `number`."""
        self.next = number, first
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.constant([number, first], tf.int64)
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def _begun(self, _: Any) -> Any:
        """Where an iterator begins, and the order of its pass if Keras draws that order as a whole."""
        position = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64), [2])
        return position, self._order.drawn()

    def _whole_batches(self) -> tf.data.Dataset:
        """The global batches as Keras makes them, from `next` to the end of that pass."""
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
        """Passes whose elements hold the rows of several batches; None if the order is drawn batch by batch.

        Args:
            batches: the number of batches in an element; the last of a pass may have fewer.
        """
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
        if not self._order.one_by_one and self._can_be_buffered(layout, at_once):
            return self._passes(lambda *begun: self._by_many(layout, at_once, *begun), ahead=2, buffered=True)
        return self._passes(lambda *begun: self._by_one(layout, *begun), ahead=self._ahead())

    def _passes(
        self,
        made: Callable[[Any, Any], tf.data.Dataset],
        *,
        ahead: int,
        each: int = 1,
        buffered: bool = False,
    ) -> Passes:
        """Passes over the dataset that `made` returns for a position and a drawn order.

        `made` is called in the function that runs when an iterator begins.
        """

        def make() -> tf.data.Dataset:
            # One function only: making an iterator takes milliseconds for each function of its dataset.
            begun = tf.data.Dataset.range(1).flat_map(unconverted(lambda _: made(*self._begun(_))))
            return begun.with_options(_options()).prefetch(ahead)

        return Passes(self, make, each=each, alike=self._order.same_each_pass, buffered=buffered)

    def _fetched(self, places: Any, step: Any, number: Any, drawn: Any) -> Any:
        return upstream_data.some_rows(self._values, self._order.rows_at(places, step, number, drawn))

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

    def _by_one(self, layout: ReplicaLayout, position: Any, drawn: Any) -> tf.data.Dataset:
        """This process' parts of the batches, one batch per element."""
        even = self._rows % self.batch == 0

        def one(later: Any) -> Any:
            later += position[1]
            step, number = later % self.steps, position[0] + later // self.steps
            start = step * self.batch
            size = self.batch if even else tf.minimum(tf.constant(self.batch, tf.int64), self._rows - start)
            parts = []
            for low, high in _bounds_of_parts(size, layout):
                # Computes one extra place and drops it, because `permute` needs at least one place.
                places = tf.minimum(start + tf.range(low, high + 1, dtype=tf.int64), start + size - 1)
                rows = self._order.rows_at(places, step, number, drawn)[:-1]
                parts.append(upstream_data.some_rows(self._values, rows))
            return parts[0] if layout.replicas == 1 else (tuple(parts), tf.cast(size, tf.int32))

        return _endless().map(unconverted(one))

    def _by_many(self, layout: ReplicaLayout, at_once: int, position: Any, drawn: Any) -> tf.data.Dataset:
        """This process' parts of several equal batches per element; leaves of shape (batches, rows, ...)."""
        full, rest = divmod(self._rows, self.batch)

        def groups_from(first: Any) -> Any:
            return -(-tf.maximum(full - first, 0) // at_once) + (1 if rest else 0)

        of_first, of_pass = groups_from(position[1]), groups_from(tf.zeros([], tf.int64))

        def some(group: Any) -> Any:
            number, first = _position_of_group(group, at_once, position, of_first, of_pass)
            first = tf.minimum(first, full)
            count = tf.minimum(tf.constant(at_once, tf.int64), full - first)
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
        """The number of batches to read ahead, by their size: from 2 to 32."""
        if not self._dense:
            return 2  # the bytes of a batch are not known
        return max(2, min(32, int(_READ_AHEAD // max(1, self._bytes_of_batch()))))

    def _bytes_of_batch(self) -> int:
        return self.batch * sum(row_bytes(leaf) for leaf in self._leaves if isinstance(leaf, tf.Tensor))


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _options() -> tf.data.Options:
    options = tf.data.Options()
    # Optimizing the graph, which contains the arrays, takes longer than it saves.
    options.experimental_optimization.apply_default_optimizations = False
    # The pipeline needs no tuning, and deleting an iterator that tunes one is slow (`iterators.py`).
    options.autotune.enabled = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


def _position_of_group(
    group: Any, batches: int, position: Any, of_first: Any, of_pass: Any
) -> tuple[Any, Any]:
    """The number of a group's pass, and the number of the group's first batch in that pass.

    Args:
        group: the group's number, counted from the position.
        batches: the number of batches in a group.
        position: the pass and the batch where the first pass begins; later passes begin at their first batch.
        of_first, of_pass: the number of groups in the first pass, and in every later pass.
    """
    later = group - of_first
    number = tf.where(later < 0, position[0], position[0] + 1 + later // of_pass)
    first = tf.where(later < 0, position[1] + group * batches, later % of_pass * batches)
    return number, first


def _bounds_of_parts(rows: Any, layout: ReplicaLayout) -> list[tuple[Any, Any]]:
    first = layout.first_replica
    return [bounds(rows, r, layout.replicas) for r in range(first, first + layout.local_replicas)]


def _in_batches(rows: Any, batches: Any, size: Any) -> Any:
    """Reshapes a leaf with the rows of several batches to (batches, size, ...)."""
    known = tf.cast(tf.stack([batches, size]), tf.int64)
    shaped = tf.reshape(rows, tf.concat([known, tf.shape(rows, tf.int64)[1:]], axis=0))
    return tf.ensure_shape(shaped, [None, size if isinstance(size, int) else None, *rows.shape[1:]])


def _endless() -> tf.data.Dataset:
    return tf.data.Dataset.range(tf.int64.max)
