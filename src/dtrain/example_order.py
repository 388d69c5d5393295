"""In which order do examples come? Orders computed from a seed and the number of the epoch.

A permutation is computed place by place and never stored, so any process can ask for any batch of any epoch.
Only Keras' own order of arrays, with a global seed, is drawn as a whole. No example is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow's own `index_shuffle` uses 4 rounds of its cipher: of a million places neighbours then stay
# neighbours (a correlation of 0.46). From 8 rounds on there was no correlation.
_ROUNDS = 16
LARGEST_SEED = 2**31 - 1
"""Numbers of a seed of `ArrayOrder` are below it."""

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64

_as_is = tf.autograph.experimental.do_not_convert

# The purpose of a random number: two purposes must not get the same numbers from one seed and epoch.
EXAMPLES, BATCHES, FILES, BLOCKS, AUGMENT = range(5)


@dataclass(frozen=True)
class BatchSpan:
    """Where one global batch lies in the order; int64 scalars.

    Attributes:
        start: its first place, within its bucket.
        rows: its examples; 0 after the end of the epoch.
        bucket: the number of its bucket; 0 without buckets.
        bound: the length that its examples are padded to; -1 for the length of the longest.
    """

    start: Any
    rows: Any
    bucket: Any
    bound: Any


class PlainOrder:
    """The examples of a source in batches, each epoch in another order.

    Args:
        examples: how many there are.
        batch: rows of a full batch.
        steps: batches of an epoch; those after the last example are empty.
        seed: of the order; None keeps the source's own order.
        salt: makes orders with the same seed differ, such as those of workers with files of their own.
    """

    def __init__(self, examples: int, batch: int, steps: int, seed: int | None, salt: int = 0) -> None:
        self.batch = batch
        self.steps = steps
        self._examples = examples
        self._seed = seed
        self._salt = salt

    @property
    def even(self) -> bool:
        """Whether every batch is full."""
        return self.steps * self.batch <= self._examples

    def at(self, epoch: Any, step: Any) -> BatchSpan:
        """Where the batch of a step lies; all int64 scalars."""
        start = step * self.batch
        rows = tf.clip_by_value(self._examples - start, 0, self.batch)
        zero = tf.zeros([], tf.int64)
        return BatchSpan(start, rows, zero, zero - 1)

    def indices(self, epoch: Any, at: BatchSpan, places: Any) -> Any:
        """Which examples are at some places of a batch.

        Args:
            epoch: int64 scalar.
            at: where the batch lies.
            places: int64 of shape (n,), counted from the batch's first; a place after its end gives an
                arbitrary example.
        """
        places = tf.minimum(at.start + places, self._examples - 1)
        if self._seed is None:
            return places
        key = mixed(self._seed, EXAMPLES, self._salt, epoch)
        return permuted(places, self._examples, key)


class BucketOrder:
    """Batches of examples of like lengths; every example is in one batch.

    Batches hold examples of one bucket, and those of different buckets come mixed.

    Args:
        lengths: of each example, int64 of shape (examples,).
        bounds: the buckets' upper bounds, ascending; longer examples make one more bucket.
        batch: rows of a full batch.
        seed: of the order; None keeps the source's own within a bucket, shortest bucket first.
        drop_remainder: leave out the last, short batch of every bucket.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        bounds: tuple[int, ...],
        batch: int,
        seed: int | None,
        *,
        drop_remainder: bool,
    ) -> None:
        of_example = np.searchsorted(np.asarray(bounds, np.int64), lengths, side="left")
        sizes = np.bincount(of_example, minlength=len(bounds) + 1).astype(np.int64)
        batches = sizes // batch if drop_remainder else -(-sizes // batch)
        self.steps = int(batches.sum())
        with tf.device("CPU:0"):
            self._members = tf.constant(np.argsort(of_example, kind="stable"), tf.int64)
            self._sizes = tf.constant(sizes)
            self._firsts = tf.constant(np.cumsum(sizes) - sizes)
            self._begins = tf.constant(np.cumsum(batches) - batches)
            self._ends = tf.constant(np.cumsum(batches))
            self._bounds = tf.constant([*bounds, -1], tf.int64)
        self.batch = batch
        self.even = drop_remainder
        self._seed = seed

    def at(self, epoch: Any, step: Any) -> BatchSpan:
        """As `PlainOrder.at`."""
        if self._seed is not None:
            key = mixed(self._seed, BATCHES, epoch)
            step = permuted(step[None], self.steps, key)[0]
        bucket = tf.searchsorted(self._ends, step[None], side="right", out_type=tf.int64)[0]
        start = (step - tf.gather(self._begins, bucket)) * self.batch
        rows = tf.clip_by_value(tf.gather(self._sizes, bucket) - start, 0, self.batch)
        return BatchSpan(start, rows, bucket, tf.gather(self._bounds, bucket))

    def indices(self, epoch: Any, at: BatchSpan, places: Any) -> Any:
        """As `PlainOrder.indices`."""
        size = tf.gather(self._sizes, at.bucket)
        places = tf.minimum(at.start + places, size - 1)
        if self._seed is not None:
            places = permuted(places, size, mixed(self._seed, EXAMPLES, epoch, at.bucket))
        return tf.gather(self._members, tf.gather(self._firsts, at.bucket) + places)


class ArrayOrder:
    """The order in which Keras' `fit` reads arrays.

    With a global seed Keras draws the same order in every epoch, and this is that order. Without one each
    pass over the arrays has another order, computed from the seed given here.

    Args:
        rows: of the arrays.
        batch: rows of a full batch.
        shuffle: the argument of `fit`: False, True, or "batch" to mix rows within each batch.
        seed: two numbers below `LARGEST_SEED`.
        fixed: whether every pass has the order that Keras draws with this seed.

    Attributes:
        steps: batches of a pass.
        same_each_pass: whether all passes have one order.
        one_by_one: whether each batch is drawn by itself, so that rows of several cannot be asked for at
            once.
        random_access: whether the rows of any batch can be had without those of the batches before it.
    """

    def __init__(self, rows: int, batch: int, shuffle: Any, seed: tuple[int, int], *, fixed: bool) -> None:
        self._rows, self._batch = rows, batch
        self._seed = seed
        self._shuffle = bool(shuffle)
        self._drawn = self._shuffle and fixed
        self.steps = -(-rows // batch)
        self.same_each_pass = fixed or not self._shuffle
        self.one_by_one = shuffle == "batch"
        self.random_access = not (self.one_by_one and self._drawn)

    def drawn(self) -> Any:
        """The rows of a whole pass where Keras draws them at once; else none. int64 of shape (n,)."""
        draws = self._drawn and not self.one_by_one
        rows = tf.range(self._rows if draws else 0, dtype=tf.int64)
        return self._keras_shuffled(rows) if draws else rows

    def rows_at(self, places: Any, step: Any, number: Any, drawn: Any) -> Any:
        """The rows at some places of a pass.

        Args:
            places: int64 of shape (n,), counted from the first of the pass. All lie in the batch `step` if
                the order is `one_by_one`.
            step: number of their batch, an int64 scalar.
            number: of the pass, an int64 scalar.
            drawn: what `drawn` gave for this pass.
        """
        if not self._shuffle:
            return places
        if self._drawn:
            return tf.gather(drawn, places)
        if self.one_by_one:
            start = step * self._batch
            size = tf.minimum(tf.constant(self._batch, tf.int64), self._rows - start)
            return start + permute(places - start, size, self._seed_with(self._seed[1] + number, step))
        return permute(places, self._rows, self._seed_with(tf.constant(self._seed[1], tf.int64), number))

    def batches(self, number: Any, first: Any, drawn: Any) -> tf.data.Dataset:
        """The rows of each batch of a pass, from the batch `first` on."""
        if self.random_access:

            def rows(step: Any) -> Any:
                return self._shaped(self.rows_at(self.places(step), step, number, drawn))

            return tf.data.Dataset.range(first, self.steps).map(_as_is(rows))
        # One operation draws for all batches of a pass, one after the other.
        batches = tf.data.Dataset.range(self.steps).map(_as_is(self.places)).map(_as_is(self._keras_shuffled))
        return batches.skip(first).map(_as_is(self._shaped))

    def places(self, step: Any, batches: int = 1) -> Any:
        """The places of so many batches, from the batch `step` on: int64 of shape (n,)."""
        start = step * self._batch
        return tf.range(start, tf.minimum(start + batches * self._batch, self._rows))

    def _keras_shuffled(self, rows: Any) -> Any:
        """As Keras' `tf.random.shuffle` orders them: each iterator draws the same numbers anew."""
        return tf.raw_ops.RandomShuffle(value=rows, seed=self._seed[0], seed2=self._seed[1])

    def _seed_with(self, *numbers: Any) -> Any:
        seed = tf.stack([tf.constant(self._seed[0], tf.int64), *numbers]) % LARGEST_SEED
        return tf.cast(seed, tf.int32)

    def _shaped(self, rows: Any) -> Any:
        return tf.ensure_shape(rows, [None if self._rows % self._batch else self._batch])


def permute(places: Any, size: Any, seed: Any) -> Any:
    """The images of some places under a random permutation of `size` places.

    The permutation is a cipher over the places (Simon, applied until the result lies inside), so nothing of
    the size of the whole is stored.

    Args:
        places: int64 of shape (n,), below `size`; n is at least 1.
        size: at least 1; an integer or an int64 scalar.
        seed: int32 of shape (3,).
    """
    size = tf.cast(size, tf.int64)
    return tf.raw_ops.RandomIndexShuffle(index=places, seed=seed, max_index=size - 1, rounds=_ROUNDS)


def permuted(places: Any, size: Any, key: Any) -> Any:
    """As `permute`; `key` is a uint64 scalar such as `mixed` gives."""
    # A bitcast loses its shape in a graph, and the operation must know it.
    return permute(places, size, tf.reshape(tf.concat([tf.bitcast(key, tf.int32), [0]], axis=0), [3]))


def example_seeds(seed: int, epoch: Any, numbers: Any) -> Any:
    """A seed for the augmentation of each example in an epoch: int32 of shape (n, 2).

    Args:
        seed: the pipeline's.
        epoch: int64 scalar.
        numbers: of the examples in the whole source, int64 of shape (n,).
    """
    return tf.bitcast(mixed(seed, AUGMENT, epoch, numbers), tf.int32)


def mixed(*numbers: Any) -> Any:
    """A hash of several numbers: uint64, of their common shape.

    It applies SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) once
    for each number.

    Args:
        numbers: Python integers, which should come first, and int64 tensors.
    """
    state: Any = 0
    for number in numbers:
        if isinstance(state, int) and isinstance(number, int):
            state = _split_mix(state ^ (number & _MASK))
        else:
            state = _split_mix_tensor(tf.bitwise.bitwise_xor(_unsigned(state), _unsigned(number)))
    return _unsigned(state)


def _unsigned(number: Any) -> Any:
    if isinstance(number, int):
        return tf.constant(number & _MASK, tf.uint64)
    return number if number.dtype == tf.uint64 else tf.bitcast(number, tf.uint64)


def _split_mix(state: int) -> int:
    state = (state + _STEP) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


def _split_mix_tensor(state: Any) -> Any:
    state = state + tf.constant(_STEP, tf.uint64)
    state = _folded(state, 30) * tf.constant(_FIRST, tf.uint64)
    state = _folded(state, 27) * tf.constant(_SECOND, tf.uint64)
    return _folded(state, 31)


def _folded(state: Any, bits: int) -> Any:
    return tf.bitwise.bitwise_xor(state, tf.bitwise.right_shift(state, tf.constant(bits, tf.uint64)))
