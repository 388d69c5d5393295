"""Runs many steps in one XLA program, on one replica.

The program takes the rows of a group of batches and loops over the batches, so that many steps share the cost
of a call. The number of steps per call changes no bit of the result. Where a single step would not be
compiled, uniform random numbers are those of TensorFlow's own kernels: the random bits are equal already,
because both use the Philox generator, but XLA converts them to floats in another way. When to use XLA is not
decided here, but in `xla_rule.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import map_leaves, present_leaves
from dtrain.engine.feed.groups import Part, batch_of
from dtrain.engine.replica.thread_state import thread_state
from dtrain.upstream import tf_tracing

Step = Callable[[Any], Any]


# Bits of a float32: the mask of its fraction, and the sign and exponent of the numbers in [1, 2).
_FRACTION = 0x7FFFFF
_FROM_ONE = 0x3F800000


class XlaSteps:
    """A step, compiled to run on many batches in one call.

    Args:
        step: runs one step of the model on a batch.
        model: a model with one replica, on whose device the steps run.
        returns: whether `run` returns what the step returns, a nest of tensors of shape (rows, ...).
    """

    def __init__(self, step: Step, model: Any, *, returns: bool = False) -> None:
        self._step = step
        self._model = model
        self._returns = returns
        self._programs: dict[str, Callable[..., Any]] = {}

    @property
    def traced(self) -> int:
        """The number of compiled programs."""
        return len(self._programs)

    def run(self, part: Part) -> list[Any]:
        """Runs the steps of a part of a group; returns their outputs, one nest or several in order."""
        with tf.device(replica_device(self._model.distribute_strategy)):
            return self._run(part)

    def _run(self, part: Part) -> list[Any]:
        if part.size == part.width:
            program = self._program(part.rows, part.size)
            outputs = program(part.rows, tf.constant(part.first), tf.constant(part.steps))
            return [tf.nest.map_structure(lambda rows: rows[: part.steps * part.size], outputs)]
        # A smaller batch, such as the last of an epoch, has its own program.
        results = []
        for number in range(part.first, part.first + part.steps):
            rows = batch_of(part._replace(first=number))
            results.append(self._program(rows, part.size)(rows, tf.constant(0), tf.constant(1)))
        return results

    def _program(self, rows: Any, size: int) -> Callable[..., Any]:
        key = f"{[(leaf.shape, leaf.dtype) for leaf in present_leaves(rows)]} {size}"
        if key not in self._programs:
            self._programs[key] = self._made(rows, size)
        return self._programs[key]

    def _made(self, rows: Any, size: int) -> Callable[..., Any]:
        def many(rows: Any, first: Any, count: Any) -> Any:
            def body(number: Any, outputs: Any) -> Any:
                def batch(leaf: Any) -> Any:
                    if leaf is None:
                        return None
                    # Not a slice: XLA would compile the program again for each position where a slice begins.
                    return tf.gather(tf.reshape(leaf, [-1, size, *leaf.shape[1:]]), first + number)

                with self._random_numbers():
                    values = step(map_leaves(batch, rows))
                if self._returns:
                    outputs = tf.nest.map_structure(
                        lambda array, value: array.write(number, value), outputs, values
                    )
                return number + 1, outputs

            most = present_leaves(rows)[0].shape[0] // size
            start = tf.nest.map_structure(
                lambda spec: tf.TensorArray(spec.dtype, most, element_shape=spec.shape), specs
            )
            _, outputs = tf.while_loop(
                lambda number, _: number < count, body, (tf.constant(0), start), parallel_iterations=1
            )
            # What no step has written is zero.
            return tf.nest.map_structure(
                lambda array, spec: tf.reshape(array.stack(), [-1, *spec.shape[1:]]), outputs, specs
            )

        step, specs = self._step, ()
        if self._returns:
            step = self._traced(rows, size)
            specs = step.structured_outputs
        number = tf.TensorSpec([], tf.int32)
        function = tf_tracing.made_for_each_model(many, jit_compile=True)
        made: Callable[..., Any] = function.get_concrete_function(rows, number, number)
        return made

    def _traced(self, rows: Any, size: int) -> Any:
        """The step as a function for batches of this size, which knows the specs of what it returns."""

        def of_batch(leaf: Any) -> Any:
            return None if leaf is None else tf.TensorSpec([size, *leaf.shape[1:]], leaf.dtype)

        with self._random_numbers():
            step = tf_tracing.made_for_each_model(self._step)
            return step.get_concrete_function(map_leaves(of_batch, rows))

    def _random_numbers(self) -> contextlib.AbstractContextManager[Any]:
        """Where each step is compiled by itself, as Keras asks for, it draws XLA's own random numbers."""
        return contextlib.nullcontext() if self._model.jit_compile else same_random_numbers()


def replica_device(strategy: Any) -> str | None:
    """The device of a strategy's only replica; None under the default strategy, which does not know it.

    What XLA compiles is one operation, which must be on the device of the variables that it reads.
    """
    with contextlib.suppress(RuntimeError):
        return str(strategy.extended.worker_devices[0])
    return None


def same_random_numbers() -> contextlib.AbstractContextManager[None]:
    """A context: code traced in it draws the same random numbers in XLA as outside of XLA."""
    return thread_state.having(same_random_numbers=True)


def uniform(
    original: Callable[..., Any],
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = tf.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    """The replacement of `tf.random.stateless_uniform`."""
    plain = isinstance(minval, int) and minval == 0 and maxval is None and alg in ("auto_select", None)
    if not (thread_state.same_random_numbers and plain and tf.as_dtype(dtype) == tf.float32):
        return original(shape, seed, minval, maxval, dtype, name, alg)
    bits = original(shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox")
    fraction = tf.bitwise.bitwise_and(bits, tf.constant(_FRACTION, tf.uint32))
    whole = tf.bitwise.bitwise_or(fraction, tf.constant(_FROM_ONE, tf.uint32))
    return tf.bitcast(whole, tf.float32) - 1.0
