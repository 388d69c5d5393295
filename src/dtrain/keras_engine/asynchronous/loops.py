"""The loop of a block: runs a number of steps one after another, in the graph.

It is partly unrolled. What a step does is not known here.
"""

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
