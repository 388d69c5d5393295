"""Gives each replica its own random numbers, reproducible from the seed.

Keras' random layers draw seeds from a generator whose state is equal on all replicas. The replica's number is
mixed into each drawn seed, never into the generator's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.replica.context import in_replica
from dtrain.engine.replica.rematerialization import drawn
from dtrain.engine.replica.thread_state import thread_state
from dtrain.upstream import tf_replicas, tf_tracing

# An odd constant with well-spread bits (2**32 / golden ratio), so that neighbouring replicas get distant
# seeds.
_SPREAD = 0x9E3779B1


_drawn: int | None = None


def note_drawn(seed: int) -> None:
    """Notes a global seed that dtrain, not the program, has drawn for the workers of this attempt."""
    global _drawn
    _drawn = seed


def program_seed() -> int | None:
    """The global seed that the program has set, or None."""
    seed: int | None = tf_tracing.global_seed()
    return None if seed == _drawn else seed


def next_seed(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
    """The replacement of `SeedGenerator.next`."""
    return drawn(lambda: _mixed(original(self, ordered)))


def _mixed(seed: Any) -> Any:
    """The generator's seed, mixed with the number of this replica or of this block of steps."""
    block = thread_state.block
    if block is not None and block.mixed_into_seeds is not None:
        return mix(seed, block.mixed_into_seeds)
    return mix(seed, tf_replicas.replica_id()) if in_replica() else seed


def mix(seed: Any, number: Any) -> Any:
    """A seed derived from a seed and a number; the number 0 gives the seed itself.

    Args:
        seed: an integer tensor of shape (2,).
        number: the number of a replica or of a block of steps, an integer or an integer scalar.

    Returns:
        A seed of the same shape and dtype.
    """
    spread = tf.bitwise.bitwise_and(tf.cast(number, tf.int64) * _SPREAD, 0xFFFFFFFF)
    return seed + tf.stack([tf.cast(spread, seed.dtype), tf.zeros([], seed.dtype)])
