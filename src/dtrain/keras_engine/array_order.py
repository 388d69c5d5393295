"""Arrays that `fit` was given, as batches from any place of any epoch: their order is computed, not kept.

With a global seed the order is Keras' own, number for number; without one it follows from a seed drawn here.
"""

from __future__ import annotations

import secrets
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.positions import Place
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.upstream import datasets as upstream_data
from dtrain.upstream import tensorflow as upstream_tf

# With fewer rounds of its cipher TensorFlow's `index_shuffle` leaves neighbours together.
_ROUNDS = 16
_LARGEST_SEED = 2**31 - 1


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
        dataset: global batches.
    """

    kind = "arrays"
    computed = True

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._rows, self._batch, self._shuffle = upstream_data.array_facts(adapter)
        self._steps = -(-self._rows // self._batch)
        self._seed, self._fixed = self._choose_seed(layout)
        # Where the next pass over the data begins: its number, and its first batch.
        with tf.init_scope(), tf.device("CPU:0"):
            self._place = upstream_tf.unnamed_variable_handle(tf.int64, [2])
        self._set_place(0, 0)
        self._arrays = tf.data.Dataset.from_tensors(upstream_data.arrays_of(adapter)).repeat()
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

    def begin(self, number: int) -> None:
        """The next iterator is for pass `number`, from its beginning."""
        self._set_place(number, 0)

    def rest(self, place: Place) -> Any:
        """What to iterate over, once, for the pass that goes on at the place."""
        self._set_place(place.passes - 1, place.taken)
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

    def _set_place(self, number: int, first: int) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.constant([number, first], tf.int64)
            tf.raw_ops.AssignVariableOp(resource=self._place, value=value)

    def _make(self) -> tf.data.Dataset:
        """As Keras makes it, but for the place where it begins."""
        places = tf.data.Dataset.range(1).map(_plain(self._begun)).prefetch(1)
        indices = places.flat_map(_plain(self._indices))
        batches = tf.data.Dataset.zip((indices, self._arrays)).map(
            _plain(lambda indices, arrays: upstream_data.some_rows(arrays, indices)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        options = tf.data.Options()
        # It would take longer to rewrite the graph, with the arrays in it, than it saves.
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        return batches.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _begun(self, _: Any) -> Any:
        """The pass' place, and the whole order where that must be drawn at once."""
        place = tf.raw_ops.ReadVariableOp(resource=self._place, dtype=tf.int64)
        order = tf.range(self._rows if self._drawn else 0, dtype=tf.int64)
        return place, self._drawn_anew(order) if self._drawn else order

    @property
    def _drawn(self) -> bool:
        return bool(self._shuffle) and self._shuffle != "batch" and self._fixed

    def _indices(self, place: Any, order: Any) -> tf.data.Dataset:
        """The rows of each batch, from the place on."""
        number, first = place[0], place[1]
        if self._shuffle == "batch" and self._fixed:
            # One operation draws for one batch after the other.
            whole = tf.data.Dataset.range(self._steps).map(_plain(self._plain_rows))
            return whole.map(_plain(self._drawn_anew)).skip(first).map(_plain(self._shaped))

        def rows(step: Any) -> Any:
            places = self._plain_rows(step)
            if self._drawn:
                places = tf.gather(order, places)
            elif self._shuffle == "batch":
                start = step * self._batch
                size = tf.size(places, out_type=tf.int64)
                places = start + self._sent(places - start, size, self._seed[1] + number, step)
            elif self._shuffle:
                places = self._sent(places, self._rows, tf.constant(self._seed[1], tf.int64), number)
            return self._shaped(places)

        return tf.data.Dataset.range(first, self._steps).map(_plain(rows))

    def _plain_rows(self, step: Any) -> Any:
        start = step * self._batch
        return tf.range(start, tf.minimum(start + self._batch, self._rows))

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


def _plain(function: Any) -> Any:
    return tf.autograph.experimental.do_not_convert(function)
