"""How long a replica waits for the others in a step, measured inside the step's own program.

All workers' steps take equally long, since they wait for each other; without the waiting they show who is
slow. Clocks only look on: nothing that is computed depends on them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Waits:
    """The waiting of one replica in one step.

    It is measured where values of all replicas are put together: from the moment when the replica has given
    its own to that when it has everybody's. Of two that overlap, what they share counts once.
    """

    def __init__(self) -> None:
        self._spans: list[Any] = []
        self._last: Any = None
        self._expected: Any = None
        self._place = _place()

    def begin(self, values: Any) -> Any:
        """The time when the replica has `values`, a nest of tensors; what `end` wants."""
        return _time_of(values) if _place() is self._place else None

    def end(self, begun: Any, values: Any) -> None:
        """The replica has what became of its values."""
        if begun is None:  # inside a function of the user's own, from which no time can be taken
            return
        now = _time_of(values)
        start = begun if self._last is None else tf.maximum(begun, self._last)
        self._spans.append(tf.maximum(now - start, tf.zeros([], tf.float64)))
        self._last = now

    def expect(self, value: Any) -> None:
        """A value of all replicas is on its way, while the replica computes what does not need it."""
        self._expected = value

    def meet(self, values: Any) -> None:
        """From when it has `values` on, the replica can only wait for what it expects, if anything."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self.end(self.begin(values), expected)

    def total(self) -> Any:
        """Seconds, a float64 scalar."""
        return tf.add_n(self._spans) if self._spans else tf.zeros([], tf.float64)


class NoWaits:
    """Nobody wants to know how long a replica waits, or the transport does."""

    def begin(self, values: Any) -> Any:
        """Nothing."""

    def end(self, begun: Any, values: Any) -> None:
        """Nothing."""

    def expect(self, value: Any) -> None:
        """Nothing."""

    def meet(self, values: Any) -> None:
        """Nothing."""

    def total(self) -> Any:
        """Not known."""


def _place() -> Any:
    """Where operations are put now."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _time_of(values: Any) -> Any:
    """The time when all of a nest of tensors are there, in seconds, on the host."""
    tensors = [each for each in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(each)]
    with tf.control_dependencies(tensors), tf.device("CPU:0"):
        return tf.timestamp()
