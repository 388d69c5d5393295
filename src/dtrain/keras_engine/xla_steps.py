"""Runs of steps in one XLA program, for the only replica.

The rows of a group of batches are its input, and a loop over them is inside, so that what a call costs is
divided by many steps. A run of any length gives the same bits, one of a single step too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.groups import Part, batch_of
from dtrain.keras_engine.input import map_leaves, present_leaves
from dtrain.keras_engine.randoms import same_random_numbers

Step = Callable[[Any], Any]


class XlaSteps:
    """A train step, made for many batches at once.

    Args:
        step: makes one step on a batch; what it returns is not looked at.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._programs: dict[str, Callable[..., Any]] = {}

    @property
    def traced(self) -> int:
        """How many programs there are."""
        return len(self._programs)

    def run(self, part: Part) -> None:
        """Makes the steps of a part."""
        if part.size == part.width:
            self._program(part.rows, part.size)(part.rows, tf.constant(part.first), tf.constant(part.steps))
            return
        # Smaller than the others, as an epoch's last: a program of its own.
        for number in range(part.first, part.first + part.steps):
            rows = batch_of(part._replace(first=number))
            self._program(rows, part.size)(rows, tf.constant(0), tf.constant(1))

    def _program(self, rows: Any, size: int) -> Callable[..., Any]:
        key = f"{[(leaf.shape, leaf.dtype) for leaf in present_leaves(rows)]} {size}"
        if key not in self._programs:
            self._programs[key] = self._made(rows, size)
        return self._programs[key]

    def _made(self, rows: Any, size: int) -> Callable[..., Any]:
        def many(rows: Any, first: Any, count: Any) -> None:
            def body(number: Any) -> Any:
                def batch(leaf: Any) -> Any:
                    if leaf is None:
                        return None
                    # Not a slice: XLA would compile the program again for each place where one begins.
                    return tf.gather(tf.reshape(leaf, [-1, size, *leaf.shape[1:]]), first + number)

                with same_random_numbers():
                    self._step(map_leaves(batch, rows))
                return number + 1

            tf.while_loop(lambda number: number < count, body, (tf.constant(0),), parallel_iterations=1)

        number = tf.TensorSpec([], tf.int32)
        function = tf.function(many, jit_compile=True, autograph=False)
        made: Callable[..., Any] = function.get_concrete_function(rows, number, number)
        return made
