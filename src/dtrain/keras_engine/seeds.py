"""Gives each replica its own random numbers, which repeat with the seed.

Keras' random layers draw from a seed generator whose state is equal on all replicas; the replica's number
is mixed into what is drawn, never into the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.asynchronous.tracing import current_block
from dtrain.keras_engine.protocol import in_replica
from dtrain.keras_engine.rematerialization import drawn
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.reach import replaces

# An odd constant with well-spread bits (2**32 over the golden ratio): neighbours get distant seeds.
_SPREAD = 0x9E3779B1


_drawn: int | None = None


def note_drawn(seed: int) -> None:
    """Notes a global seed that the program did not set: it was drawn for the workers of this attempt."""
    global _drawn
    _drawn = seed


def program_seed() -> int | None:
    """The global seed that the program has set, or None."""
    found: int | None = upstream_tf.global_seed()
    return None if found == _drawn else found


@replaces(upstream_keras.SEED_NEXT)
def next_seed(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
    """The replacement of `SeedGenerator.next`."""
    return drawn(lambda: _mixed(original(self, ordered)))


def _mixed(seed: Any) -> Any:
    """What this replica, or this block of steps, draws where the generator gives a seed."""
    block = current_block()
    if block is not None and block.mixed_into_seeds is not None:
        return mix(seed, block.mixed_into_seeds)
    return mix(seed, upstream_tf.replica_id()) if in_replica() else seed


def mix(seed: Any, number: Any) -> Any:
    """A seed of shape (2,) made different by a number; 0 keeps it.

    Args:
        seed: an integer tensor of shape (2,).
        number: a replica's, or a block's: an integer or an integer scalar.
    """
    spread = tf.bitwise.bitwise_and(tf.cast(number, tf.int64) * _SPREAD, 0xFFFFFFFF)
    return seed + tf.stack([tf.cast(spread, seed.dtype), tf.zeros([], seed.dtype)])
