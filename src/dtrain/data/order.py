"""In which order do examples come? A permutation that is computed from (seed, epoch), place by place.

Nothing is drawn and nothing is kept: any process can ask for any place of any epoch. It reads no examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow's own `index_shuffle` takes 4 rounds of its cipher: of a million places neighbours then stay
# neighbours (a correlation of 0.46). From 8 on none was seen.
_ROUNDS = 16
_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64

# What a number is for: the same seed and epoch must not give two things the same random numbers.
EXAMPLES, BATCHES, FILES, BLOCKS, AUGMENT = range(5)


@dataclass(frozen=True)
class At:
    """Where one global batch lies in the order; int64 scalars.

    Attributes:
        start: its first place, within its bucket.
        rows: its examples; 0 behind the end.
        bucket: the number of its bucket; 0 where there are none.
        bound: the length that its examples are padded to; -1: that of its longest.
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
        steps: batches of an epoch; those behind the end of the examples are empty.
        seed: of the order; None keeps the source's own.
        salt: tells apart orders that share a seed, such as those of workers with files of their own.
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

    def at(self, epoch: Any, step: Any) -> At:
        """Where the batch of a step lies; all int64 scalars."""
        start = step * self.batch
        rows = tf.clip_by_value(self._examples - start, 0, self.batch)
        zero = tf.zeros([], tf.int64)
        return At(start, rows, zero, zero - 1)

    def indices(self, epoch: Any, at: At, places: Any) -> Any:
        """Which examples are at some places of a batch.

        Args:
            epoch: int64 scalar.
            at: where the batch lies.
            places: int64 of shape (n,), counted from the batch's first; those behind its end give some
                example or other.
        """
        places = tf.minimum(at.start + places, self._examples - 1)
        if self._seed is None:
            return places
        key = mixed(self._seed, EXAMPLES, self._salt, epoch)
        return permuted(places, tf.constant(self._examples, tf.int64), key)


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

    def at(self, epoch: Any, step: Any) -> At:
        """As `PlainOrder.at`."""
        if self._seed is not None:
            key = mixed(self._seed, BATCHES, epoch)
            step = permuted(step[None], tf.constant(self.steps, tf.int64), key)[0]
        bucket = tf.searchsorted(self._ends, step[None], side="right", out_type=tf.int64)[0]
        start = (step - tf.gather(self._begins, bucket)) * self.batch
        rows = tf.clip_by_value(tf.gather(self._sizes, bucket) - start, 0, self.batch)
        return At(start, rows, bucket, tf.gather(self._bounds, bucket))

    def indices(self, epoch: Any, at: At, places: Any) -> Any:
        """As `PlainOrder.indices`."""
        size = tf.gather(self._sizes, at.bucket)
        places = tf.minimum(at.start + places, size - 1)
        if self._seed is not None:
            places = permuted(places, size, mixed(self._seed, EXAMPLES, epoch, at.bucket))
        return tf.gather(self._members, tf.gather(self._firsts, at.bucket) + places)


def permuted(places: Any, size: Any, key: Any) -> Any:
    """Where a random permutation of `size` places sends some of them.

    A cipher over the places (Simon, walked until it ends inside of them), so nothing of the size of the
    whole is made.

    Args:
        places: int64 of shape (n,), below `size`.
        size: int64 scalar, at least 1.
        key: uint64 scalar; another one is another permutation.
    """
    # The shape of a bitcast is lost in a graph, and the operation must know it.
    seed = tf.reshape(tf.concat([tf.bitcast(key, tf.int32), [0]], axis=0), [3])
    return tf.raw_ops.RandomIndexShuffle(index=places, seed=seed, max_index=size - 1, rounds=_ROUNDS)


def example_seeds(seed: int, epoch: Any, numbers: Any) -> Any:
    """A seed for the random changes of each example in an epoch: int32 of shape (n, 2).

    Args:
        seed: the pipeline's.
        epoch: int64 scalar.
        numbers: which examples, int64 of shape (n,), counted over the whole source.
    """
    return tf.bitcast(mixed(seed, AUGMENT, epoch, numbers), tf.int32)


def mixed(*numbers: Any) -> Any:
    """One well-mixed number made of several: uint64, of their common shape.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), once for each.

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
