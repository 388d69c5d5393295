"""Arrays that `fit` was given, as batches from any place of any epoch: their order is computed, not kept.

With a global seed the order is Keras' own, number for number; without one it follows from a seed drawn here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.keras_engine.input import bounds, map_leaves, present_leaves, row_bytes
from dtrain.keras_engine.passes import Passes
from dtrain.keras_engine.positions import Place
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import tensorflow as upstream_tf

# With fewer rounds of its cipher TensorFlow's `index_shuffle` leaves neighbours together.
_ROUNDS = 16
_LARGEST_SEED = 2**31 - 1
_READ_AHEAD = 8e6  # bytes of batches
# Batches of which so many have no more bytes than that are read so many at a time, and copied one by one.
_BATCHES_AT_ONCE = 32
_SMALL_BYTES = 2e6


class ArraySource:
    """Keras' batches of arrays.

    With a global seed (`keras.utils.set_random_seed`) Keras draws the same order in every epoch, and so do
    these. Without, each epoch has another order.

    Args:
        adapter: Keras' adapter.
        layout: how the replicas are spread; None under TensorFlow's own strategies.

    Attributes:
        kind: what it is, for messages.
        computed: that any place can be begun with.
        counted: that there are as many batches as Keras thinks.
        dataset: global batches.
        place: where the next pass over the data begins: its number, and its first batch.
        steps: batches in a pass.
    """

    kind = "arrays"
    computed = True
    counted = True

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._rows, self._batch, self._shuffle = upstream_data.array_facts(adapter)
        self.steps = -(-self._rows // self._batch)
        self._seed, self._fixed = self._choose_seed(layout)
        with tf.init_scope(), tf.device("CPU:0"):
            self._place = upstream_tf.unnamed_variable_handle(tf.int64, [2])
        self.set_place(0, 0)
        self._values = map_leaves(_tensor, upstream_data.arrays_of(adapter))
        self._arrays = tf.data.Dataset.from_tensors(self._values).repeat()
        self.dataset = self._make()

    def _choose_seed(self, layout: ReplicaLayout | None) -> tuple[tuple[int, int], bool]:
        """Two numbers, and whether each epoch has the same order."""
        drawn = secrets.randbits(31), secrets.randbits(31)
        if self._shuffle and layout is not None:
            # All workers must see the same batches.
            drawn = exchange(layout, drawn)[0]
        found = upstream_tf.global_seed()
        if found is None:
            return drawn, False
        first = found % _LARGEST_SEED
        # As TensorFlow seeds the first random operation of a function; twice zero would be no seed.
        return (first, 0 if first else _LARGEST_SEED), True

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must not change for a position to mean anything."""
        return {"examples": self._rows, "the batch size": self._batch, "shuffle": self._shuffle}

    def starting(self) -> None:
        """Nothing is noted."""

    @property
    def batch(self) -> int:
        """Examples in a batch; the last may have fewer."""
        return self._batch

    def in_groups(self, batches: int) -> Passes | None:
        """The rows of so many batches at a time, from the same place on; None if each is drawn by itself."""
        if self._shuffle == "batch":
            return None

        def groups(place: Any, order: Any) -> tf.data.Dataset:
            of_first = -(-(self.steps - place[1]) // batches)
            of_pass = -(-self.steps // batches)

            def rows(group: Any) -> Any:
                number, first = _place_of_group(group, batches, place, of_first, of_pass)
                places = self._ordered(self._plain_rows(first, batches), first, number, order)
                return upstream_data.some_rows(self._values, places)

            return _without_end().map(_plain(rows))

        return Passes(self, lambda: self._begun_with(groups).prefetch(2), each=batches, alike=self._alike)

    def passes(self, layout: ReplicaLayout) -> Passes | None:
        """This process' part of each batch alone, split as `SplitDataset` has it; None where that cannot be.

        Args:
            layout: how the replicas are spread; an only replica gets whole batches.
        """
        if (self._shuffle == "batch" and self._fixed) or not all(
            isinstance(leaf, tf.Tensor) for leaf in self._leaves()
        ):
            return None
        if self._shuffle != "batch" and self._can_be_stacked(layout):
            return Passes(
                self,
                lambda: self._begun_with(lambda *begun: self._by_many(layout, *begun)).prefetch(2),
                alike=self._alike,
                stacked=True,
            )
        return Passes(
            self,
            lambda: self._begun_with(lambda *begun: self._by_one(layout, *begun)).prefetch(self._ahead()),
            alike=self._alike,
        )

    def _can_be_stacked(self, layout: ReplicaLayout) -> bool:
        """Whether reading many batches at a time is worth it, and can be done.

        No part may be empty: `index_shuffle` refuses to send none. And a loop on another device than the CPU
        could move a whole stack there at each step.
        """
        smallest = self._rows % self._batch or min(self._rows, self._batch)
        # How long texts are is not known.
        sized = all(leaf is not None and leaf.dtype != tf.string for leaf in tf.nest.flatten(self._values))
        small = self._bytes_of_batch() * _BATCHES_AT_ONCE <= _SMALL_BYTES
        on_cpu = not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))
        return small and sized and on_cpu and smallest >= layout.replicas

    def _by_one(self, layout: ReplicaLayout, place: Any, order: Any) -> tf.data.Dataset:
        """The parts of one batch after the other."""
        even = self._rows % self._batch == 0

        def one(later: Any) -> Any:
            later += place[1]
            step, number = later % self.steps, place[0] + later // self.steps
            start = step * self._batch
            size = self._batch if even else tf.minimum(tf.constant(self._batch, tf.int64), self._rows - start)
            parts = []
            for low, high in _bounds_of_parts(size, layout):
                # With one place more, which is left out again: `index_shuffle` refuses to send none.
                places = start + tf.range(low, high + 1, dtype=tf.int64)
                found = self._ordered(tf.minimum(places, start + size - 1), step, number, order)[:-1]
                parts.append(upstream_data.some_rows(self._values, found))
            return parts[0] if layout.replicas == 1 else (tuple(parts), tf.cast(size, tf.int32))

        return _without_end().map(_plain(one))

    def _by_many(self, layout: ReplicaLayout, place: Any, order: Any) -> tf.data.Dataset:
        """The parts of some batches of one size at a time: each leaf of shape (batches, rows, ...)."""
        full, rest = divmod(self._rows, self._batch)

        def groups_from(first: Any) -> Any:
            return -(-tf.maximum(full - first, 0) // _BATCHES_AT_ONCE) + (1 if rest else 0)

        of_first, of_pass = groups_from(place[1]), groups_from(tf.zeros([], tf.int64))

        def some(group: Any) -> Any:
            number, first = _place_of_group(group, _BATCHES_AT_ONCE, place, of_first, of_pass)
            first = tf.minimum(first, full)
            count = tf.minimum(tf.constant(_BATCHES_AT_ONCE, tf.int64), full - first)
            size: Any = self._batch
            if rest:
                last = first >= full
                count = tf.where(last, tf.constant(1, tf.int64), count)
                size = tf.where(last, tf.constant(rest, tf.int64), self._batch)
            starts = (first + tf.range(count))[:, tf.newaxis] * self._batch

            def part(low: Any, high: Any) -> Any:
                places = tf.reshape(starts + tf.range(low, high, dtype=tf.int64), [-1])
                rows = upstream_data.some_rows(self._values, self._ordered(places, first, number, order))
                return map_leaves(lambda leaf: _in_batches(leaf, count, high - low), rows)

            parts = [part(*each) for each in _bounds_of_parts(size, layout)]
            if layout.replicas == 1:
                return parts[0]
            return tuple(parts), tf.fill(tf.expand_dims(count, 0), tf.cast(size, tf.int32))

        return _without_end().map(_plain(some))

    def _begun_with(self, made: Callable[[Any, Any], tf.data.Dataset]) -> tf.data.Dataset:
        """What is made of a place and an order when an iterator begins.

        In one function: making an iterator takes milliseconds for each that there is.
        """
        begun = tf.data.Dataset.range(1).flat_map(_plain(lambda _: made(*self._begun(_))))
        return begun.with_options(_options())

    def _leaves(self) -> list[Any]:
        return present_leaves(self._values)

    def _ahead(self) -> int:
        """Batches that are read ahead: as many as threads that share a core may well do at a time."""
        if not all(isinstance(leaf, tf.Tensor) for leaf in self._leaves()):
            return 2  # of a size that is not known
        return max(2, min(32, int(_READ_AHEAD // max(1, self._bytes_of_batch()))))

    def _bytes_of_batch(self) -> int:
        return self._batch * sum(row_bytes(leaf) for leaf in self._leaves() if isinstance(leaf, tf.Tensor))

    def begin(self, number: int) -> None:
        """The next iterator is for pass `number`, from its beginning."""
        self.set_place(number, 0)

    def rest(self, place: Place) -> Any:
        """What to iterate over, once, for the pass that goes on at the place."""
        self.set_place(place.passes - 1, place.taken)
        return self.dataset

    def state(self) -> dict[str, Any]:
        """What the order follows from."""
        return {"seed": self._seed, "fixed": self._fixed} if self._shuffle else {}

    def go_to(self, state: dict[str, Any], place: Place) -> None:
        """Takes over what the order followed from."""
        if not self._shuffle:
            return
        before = self._seed, self._fixed
        first, second = state["seed"]
        self._seed, self._fixed = (first, second), bool(state["fixed"])
        if before != (self._seed, self._fixed):
            self.dataset = self._make()

    def settle(self) -> None:
        """Nothing was begun."""

    def set_place(self, number: int, first: int) -> None:
        """Has the next pass begin at a place."""
        self.place = number, first
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.constant([number, first], tf.int64)
            tf.raw_ops.AssignVariableOp(resource=self._place, value=value)

    def _make(self) -> tf.data.Dataset:
        """As Keras makes it, but for the place where it begins."""
        places = tf.data.Dataset.range(1).map(_plain(self._begun)).prefetch(1)
        indices = places.flat_map(_plain(self._indices))
        batches = tf.data.Dataset.zip((indices, self._arrays)).map(
            _plain(lambda indices, arrays: upstream_data.some_rows(arrays, indices)),
            num_parallel_calls=2,
            deterministic=True,
        )
        return batches.with_options(_options()).prefetch(self._ahead())

    def _begun(self, _: Any) -> Any:
        """The pass' place, and the whole order where that must be drawn at once."""
        place = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self._place, dtype=tf.int64), [2])
        order = tf.range(self._rows if self._drawn else 0, dtype=tf.int64)
        return place, self._drawn_anew(order) if self._drawn else order

    @property
    def _alike(self) -> bool:
        """Whether each pass has the same order."""
        return not self._shuffle or self._fixed

    @property
    def _drawn(self) -> bool:
        return bool(self._shuffle) and self._shuffle != "batch" and self._fixed

    def _indices(self, place: Any, order: Any) -> tf.data.Dataset:
        """The numbers of the rows of each batch, from the place on."""
        number, first = place[0], place[1]
        if self._shuffle == "batch" and self._fixed:
            # One operation draws for one batch after the other.
            whole = tf.data.Dataset.range(self.steps).map(_plain(self._plain_rows))
            return whole.map(_plain(self._drawn_anew)).skip(first).map(_plain(self._shaped))

        def rows(step: Any) -> Any:
            return self._shaped(self._ordered(self._plain_rows(step), step, number, order))

        return tf.data.Dataset.range(first, self.steps).map(_plain(rows))

    def _ordered(self, places: Any, step: Any, number: Any, order: Any) -> Any:
        """The rows that stand at some places of the order of pass `number`; all are of one step's batch.

        Only where batches are not shuffled by themselves may they be of several.
        """
        if self._drawn:
            return tf.gather(order, places)
        if self._shuffle == "batch":
            start = step * self._batch
            size = tf.minimum(tf.constant(self._batch, tf.int64), self._rows - start)
            return start + self._sent(places - start, size, self._seed[1] + number, step)
        if self._shuffle:
            return self._sent(places, self._rows, tf.constant(self._seed[1], tf.int64), number)
        return places

    def _plain_rows(self, step: Any, batches: int = 1) -> Any:
        start = step * self._batch
        return tf.range(start, tf.minimum(start + batches * self._batch, self._rows))

    def _drawn_anew(self, indices: Any) -> Any:
        """As Keras' `tf.random.shuffle` draws it: each iterator from the beginning of the same numbers."""
        return tf.raw_ops.RandomShuffle(value=indices, seed=self._seed[0], seed2=self._seed[1])

    def _sent(self, places: Any, size: Any, *numbers: Any) -> Any:
        """Where a permutation of `size` places, which follows from the seed and two numbers, sends some."""
        seed = tf.stack([tf.constant(self._seed[0], tf.int64), *numbers]) % _LARGEST_SEED
        return tf.raw_ops.RandomIndexShuffle(
            index=places,
            seed=tf.cast(seed, tf.int32),
            max_index=tf.cast(size, tf.int64) - 1,
            rounds=_ROUNDS,
        )

    def _shaped(self, indices: Any) -> Any:
        even = self._rows % self._batch == 0
        return tf.ensure_shape(indices, [self._batch if even else None])


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _options() -> tf.data.Options:
    options = tf.data.Options()
    # It would take longer to rewrite the graph, with the arrays in it, than it saves.
    options.experimental_optimization.apply_default_optimizations = False
    # There is nothing to tune, and an iterator that tunes is slow to end (`ended_iterators.py`).
    options.autotune.enabled = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


def _place_of_group(group: Any, batches: int, place: Any, of_first: Any, of_pass: Any) -> tuple[Any, Any]:
    """The number of the pass that a group is of, and of the group's first batch.

    Args:
        group: its number among all, from the place on.
        batches: in a group.
        place: where the first pass begins; the others begin at their beginning.
        of_first, of_pass: groups of the first pass, and of each other.
    """
    later = group - of_first
    number = tf.where(later < 0, place[0], place[0] + 1 + later // of_pass)
    first = tf.where(later < 0, place[1] + group * batches, later % of_pass * batches)
    return number, first


def _bounds_of_parts(rows: Any, layout: ReplicaLayout) -> list[tuple[Any, Any]]:
    first = layout.first_replica
    return [bounds(rows, r, layout.replicas) for r in range(first, first + layout.local_replicas)]


def _in_batches(rows: Any, batches: Any, size: Any) -> Any:
    """The rows of some batches as a leaf of shape (batches, size, ...)."""
    known = tf.cast(tf.stack([batches, size]), tf.int64)
    shaped = tf.reshape(rows, tf.concat([known, tf.shape(rows, tf.int64)[1:]], axis=0))
    return tf.ensure_shape(shaped, [None, size if isinstance(size, int) else None, *rows.shape[1:]])


def _without_end() -> tf.data.Dataset:
    return tf.data.Dataset.range(tf.int64.max)


def _plain(function: Any) -> Any:
    return tf.autograph.experimental.do_not_convert(function)
