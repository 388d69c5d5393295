"""Computes the order of examples from a seed and the number of the epoch.

A permutation is computed position by position and never stored, so any process can compute any batch of any
epoch. The exception is Keras' own order of arrays with a global seed, which is drawn as a whole. This module
reads no example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow's own `index_shuffle` uses 4 rounds of its cipher. With a million positions, neighbours then stay
# close to each other (a correlation of 0.46). With 8 rounds or more, no correlation was measured.
_ROUNDS = 16
LARGEST_SEED = 2**31 - 1
"""The exclusive upper bound of the numbers in a seed of `ArrayOrder`."""

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64

_as_is = tf.autograph.experimental.do_not_convert

# The purposes of random numbers: one seed and epoch must give different numbers for each purpose.
EXAMPLES, BATCHES, FILES, BLOCKS, AUGMENT = range(5)


@dataclass(frozen=True)
class BatchSpan:
    """The span of one global batch in the order; all attributes are int64 scalars.

    Attributes:
        start: the position of its first example within its bucket.
        rows: the number of its examples; 0 after the end of the epoch.
        bucket: the number of its bucket; 0 without buckets.
        bound: the length to which its examples are padded; -1 means the length of the longest.
    """

    start: Any
    rows: Any
    bucket: Any
    bound: Any


class PlainOrder:
    """The order of a source's examples in batches, with another permutation in each epoch.

    Args:
        examples: the number of examples.
        batch: the number of examples in a full batch.
        steps: the number of batches of an epoch; batches after the last example are empty.
        seed: the seed of the order; None keeps the source's own order.
        salt: makes orders with the same seed differ, such as those of workers with different files.
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
        """The span of a step's batch; `epoch` and `step` are int64 scalars."""
        start = step * self.batch
        rows = tf.clip_by_value(self._examples - start, 0, self.batch)
        zero = tf.zeros([], tf.int64)
        return BatchSpan(start, rows, zero, zero - 1)

    def indices(self, epoch: Any, at: BatchSpan, places: Any) -> Any:
        """The indices of the examples at some positions of a batch.

        Args:
            epoch: int64 scalar.
            at: the span of the batch.
            places: the positions, int64 of shape (n,), counted from the batch's first example. A position
                after the batch's end gives an arbitrary example.

        Returns:
            The examples' indices in the source, int64 of shape (n,).
        """
        places = tf.minimum(at.start + places, self._examples - 1)
        if self._seed is None:
            return places
        key = mixed(self._seed, EXAMPLES, self._salt, epoch)
        return permuted(places, self._examples, key)


class BucketOrder:
    """Batches of examples of similar lengths.

    Each batch holds examples of one bucket. With a seed, batches of different buckets come in random order.

    Args:
        lengths: the length of each example, int64 of shape (examples,).
        bounds: the buckets' inclusive upper bounds, ascending; longer examples form one more bucket.
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
        """The span of a step's batch; see `PlainOrder.at`."""
        if self._seed is not None:
            key = mixed(self._seed, BATCHES, epoch)
            step = permuted(step[None], self.steps, key)[0]
        bucket = tf.searchsorted(self._ends, step[None], side="right", out_type=tf.int64)[0]
        start = (step - tf.gather(self._begins, bucket)) * self.batch
        rows = tf.clip_by_value(tf.gather(self._sizes, bucket) - start, 0, self.batch)
        return BatchSpan(start, rows, bucket, tf.gather(self._bounds, bucket))

    def indices(self, epoch: Any, at: BatchSpan, places: Any) -> Any:
        """The indices of the examples at some positions of a batch; see `PlainOrder.indices`."""
        size = tf.gather(self._sizes, at.bucket)
        places = tf.minimum(at.start + places, size - 1)
        if self._seed is not None:
            places = permuted(places, size, mixed(self._seed, EXAMPLES, epoch, at.bucket))
        return tf.gather(self._members, tf.gather(self._firsts, at.bucket) + places)


@dataclass(frozen=True)
class ArrayOrder:
    """The order in which Keras' `fit` reads arrays.

    With a global seed, Keras draws the same order in every epoch, and this class gives that order. Without
    one, each pass over the arrays has another order, computed from a seed that is given when the pass begins.

    Attributes:
        rows: the number of rows of the arrays.
        batch: the number of rows in a full batch.
        shuffle: the argument of `fit`: False, True, or "batch" to shuffle rows within each batch.
        fixed: the seed with which Keras draws the order of every pass, two numbers below `LARGEST_SEED`;
            empty if each pass has another order.
    """

    rows: int
    batch: int
    shuffle: Any
    fixed: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The number of batches of a pass."""
        return -(-self.rows // self.batch)

    @property
    def same_each_pass(self) -> bool:
        """Whether all passes have the same order."""
        return bool(self.fixed) or not self.shuffle

    @property
    def one_by_one(self) -> bool:
        """Whether each batch is drawn separately, so that one call cannot give rows of several batches."""
        return bool(self.shuffle == "batch")

    @property
    def random_access(self) -> bool:
        """Whether a batch's rows can be computed without those of the batches before it."""
        return not (self.one_by_one and self.drawn)

    @property
    def drawn(self) -> bool:
        """Whether Keras draws the order, with the seed `fixed`."""
        return bool(self.shuffle and self.fixed)

    def begun(self, seed: Any) -> Any:
        """What the rows of a pass are computed from: all rows, if Keras draws them at once, or the seed.

        Args:
            seed: two numbers below `LARGEST_SEED`, int64 of shape (2,).

        Returns:
            int64 of shape (n,).
        """
        if not self.drawn or self.one_by_one:
            return seed
        return self._keras_shuffled(tf.range(self.rows, dtype=tf.int64))

    def rows_at(self, places: Any, step: Any, number: Any, begun: Any) -> Any:
        """The rows at some positions of a pass. Not for an order without `random_access`.

        Args:
            places: the positions, int64 of shape (n,), counted from the first row of the pass. If the order
                is `one_by_one`, all must lie in the batch `step`.
            step: the number of their batch, an int64 scalar.
            number: the number of the pass, an int64 scalar.
            begun: the result of `begun` for this pass.

        Returns:
            The rows' indices, int64 of shape (n,).
        """
        if not self.shuffle:
            return places
        if self.drawn:
            return tf.gather(begun, places)
        if self.one_by_one:
            start = step * self.batch
            size = tf.minimum(tf.constant(self.batch, tf.int64), self.rows - start)
            return start + permute(places - start, size, _three(begun[0], begun[1] + number, step))
        return permute(places, self.rows, _three(begun[0], begun[1], number))

    def batches(self, number: Any, first: Any, begun: Any) -> tf.data.Dataset:
        """A dataset of the row indices of each batch of a pass, from the batch `first` on.

        Args:
            number: the number of the pass, an int64 scalar.
            first: the number of the first batch, an int64 scalar.
            begun: the result of `begun` for this pass.
        """
        if self.random_access:

            def rows(step: Any) -> Any:
                return self._shaped(self.rows_at(self.places(step), step, number, begun))

            return tf.data.Dataset.range(first, self.steps).map(_as_is(rows))
        # One stateful operation draws all batches of a pass in order, so skipped batches are drawn as well.
        batches = tf.data.Dataset.range(self.steps).map(_as_is(self.places)).map(_as_is(self._keras_shuffled))
        return batches.skip(first).map(_as_is(self._shaped))

    def places(self, step: Any) -> Any:
        """The positions of a batch: int64 of shape (n,)."""
        start = step * self.batch
        return tf.range(start, tf.minimum(start + self.batch, self.rows))

    def _keras_shuffled(self, rows: Any) -> Any:
        """The rows in the order of Keras' `tf.random.shuffle`; each new iterator repeats the same draws."""
        return tf.raw_ops.RandomShuffle(value=rows, seed=self.fixed[0], seed2=self.fixed[1])

    def _shaped(self, rows: Any) -> Any:
        return tf.ensure_shape(rows, [None if self.rows % self.batch else self.batch])


def _three(*numbers: Any) -> Any:
    """A seed of `permute`, of three int64 scalars."""
    return tf.cast(tf.stack(numbers) % LARGEST_SEED, tf.int32)


def permute(places: Any, size: Any, seed: Any) -> Any:
    """The images of some positions under a random permutation of `size` positions.

    The permutation is a cipher over the positions (Simon, applied until the result is below `size`), so no
    array of `size` elements is stored.

    Args:
        places: the positions, int64 of shape (n,), below `size`; n is at least 1.
        size: the number of all positions, at least 1; an integer or an int64 scalar.
        seed: int32 of shape (3,).

    Returns:
        int64 of shape (n,).
    """
    size = tf.cast(size, tf.int64)
    return tf.raw_ops.RandomIndexShuffle(index=places, seed=seed, max_index=size - 1, rounds=_ROUNDS)


def permuted(places: Any, size: Any, key: Any) -> Any:
    """As `permute`, with a uint64 scalar as the key, such as `mixed` returns."""
    # A bitcast loses its shape in a graph, and the operation must know it.
    return permute(places, size, tf.reshape(tf.concat([tf.bitcast(key, tf.int32), [0]], axis=0), [3]))


def example_seeds(seed: int, epoch: Any, numbers: Any) -> Any:
    """A seed for the augmentation of each example in an epoch.

    Args:
        seed: the pipeline's seed.
        epoch: int64 scalar.
        numbers: the indices of the examples in the whole source, int64 of shape (n,).

    Returns:
        int32 of shape (n, 2).
    """
    return tf.bitcast(mixed(seed, AUGMENT, epoch, numbers), tf.int32)


def mixed(*numbers: Any) -> Any:
    """A hash of several numbers, uint64 in their broadcast shape.

    It applies SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) once
    for each number.

    Args:
        numbers: Python integers and int64 tensors. Leading integers are hashed in Python, which is cheaper.
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
