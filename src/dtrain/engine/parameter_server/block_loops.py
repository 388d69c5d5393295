"""The loop of a block, which runs a number of steps in the graph one after another, and the block's clocks.

The loop is partly unrolled. The clocks change no computed value. What a step does is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.upstream import tf_tracing

State = list[tf.Tensor]


def in_turns(
    step: Callable[[tf.Tensor, State], State],
    state: State,
    shapes: Sequence[tf.TensorShape],
    *,
    first: int,
    count: tf.Tensor,
    unrolled: int,
) -> State:
    """Runs the steps `first` to `count - 1`, and returns the state after the last.

    Args:
        step: takes the number of the step (an int32 scalar) and the state, and returns the new state.
        state: the state before the first step.
        shapes: the static shapes of the state's tensors, which hold for every step.
        first: the number of the first step.
        count: one more than the number of the last step, an int32 scalar.
        unrolled: steps in one iteration of the loop; the remaining steps run one to an iteration.
    """

    def loop(end: tf.Tensor, turn: int, state: State) -> State:
        def body(i: tf.Tensor, *left: Any) -> Any:
            now = list(left)
            for more in range(turn):
                now = step(i + more, now)
            return [i + turn, *now]

        final: State = tf.while_loop(
            lambda i, *_: i < end,
            body,
            state,
            shape_invariants=[tf.TensorShape([]), *shapes],
            parallel_iterations=1,
        )
        return final

    state = [tf.constant(first), *state]
    if unrolled > 1:
        state = loop(count - (count - first) % unrolled, unrolled, state)
    return loop(count, 1, state)[1:]


def time_of(tensors: Sequence[Any]) -> tf.Tensor:
    """The time when all tensors are ready, in seconds since 1970, a float64 scalar; for use in a graph.

    It is 0 with deterministic operations, which a graph's clock is not.
    """
    if tf_tracing.deterministic_operations():
        return tf.zeros([], tf.float64)
    with tf.control_dependencies(list(tensors)):
        now = tf.timestamp()
    # Otherwise TensorFlow orders it with other stateful operations, by messages between servers and workers.
    tf_tracing.in_no_order(now.op)
    return now


def between(begun: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
    """Seconds from `begun` to `ended`; 0 if that is negative, as after a clock adjustment."""
    return tf.maximum(ended - begun, tf.zeros([], tf.float64))
