"""The loop of a block: so many steps one after another, in the graph. What a step is, the caller knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

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
    """Runs the steps from `first` to `count`, and gives what the last one leaves.

    Args:
        step: takes a step's number, an int32 scalar, and what the step before it has left.
        state: what the first step is given.
        shapes: of what a step leaves.
        first: the number of the first step.
        count: the number after the last one's, an int32 scalar.
        unrolled: steps in a turn of the loop; those that are left over have turns of their own.
    """

    def loop(end: tf.Tensor, turn: int, state: State) -> State:
        def body(i: tf.Tensor, *left: Any) -> Any:
            now = list(left)
            for more in range(turn):
                now = step(i + more, now)
            return [i + turn, *now]

        found: State = tf.while_loop(
            lambda i, *_: i < end,
            body,
            state,
            shape_invariants=[tf.TensorShape([]), *shapes],
            parallel_iterations=1,
        )
        return found

    state = [tf.constant(first), *state]
    if unrolled > 1:
        state = loop(count - (count - first) % unrolled, unrolled, state)
    return loop(count, 1, state)[1:]
