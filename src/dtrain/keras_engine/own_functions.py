"""Inlines a user's `tf.function`s into the step that calls them.

Replicas cannot communicate inside a nested function, and the step does not see what it looks up, writes or
builds. Under parameter servers, such a function would keep variables of one block, which later blocks lack.
Outside of a step, a `tf.function` is called as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.context import current_step
from dtrain.keras_engine.protocol import layout_of
from dtrain.keras_engine.thread_value import ThreadValue
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream import tensorflow_names
from dtrain.upstream.reach import replaces

_in_block = ThreadValue(False)


def in_block() -> contextlib.AbstractContextManager[bool]:
    """While the context is entered, this thread traces a block of steps for parameter servers."""
    return _in_block.set(True)


@replaces(tensorflow_names.FUNCTION_CALL)
def call(original: Callable[..., Any], self: Any, /, *args: Any, **kwds: Any) -> Any:
    """The replacement of `tf.function`'s `__call__`."""
    eager = tf.executing_eagerly()
    block = not eager and _in_block()
    in_step = current_step() is not None if eager else block or _in_replica()
    if not in_step:
        return original(self, *args, **kwds)
    if not upstream_tf.compiled_by_xla(self):
        return upstream_tf.call_inline(self, original, args, kwds)
    # XLA compiles whole functions. A block traces the function again: an earlier block's variables are gone.
    return original(upstream_tf.same_function_untraced(self) if block else self, *args, **kwds)


def _in_replica() -> bool:
    """Whether the code runs in a replica context under a strategy of dtrain's."""
    if not tf.distribute.has_strategy() or tf.distribute.get_replica_context() is None:
        return False
    return layout_of(tf.distribute.get_strategy()) is not None
