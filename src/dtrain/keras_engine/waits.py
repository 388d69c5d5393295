"""Measures how long a replica waits for other replicas in a step, inside the step's own program.

All workers' steps take equally long, because workers wait for each other; without the waiting, the times show
which worker is slow. No computed value depends on the clocks.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Waits:
    """The waiting of one replica in one step.

    Each communication between replicas is a span: from the time when the replica's own values are ready to
    the time when it has the combined values. Where two spans overlap, the common time counts once.
    """

    def __init__(self) -> None:
        self._spans: list[Any] = []
        self._last: Any = None
        self._expected: Any = None
        self._place = _place()

    def begin(self, values: Any) -> Any:
        """Begins a span, when the replica has `values`, a nest of tensors; the result is for `end`."""
        return _time_of(values) if _place() is self._place else None

    def end(self, begun: Any, values: Any) -> None:
        """Ends the span that `begin` returned, when the replica has the combined `values`."""
        if begun is None:  # inside a user's own function, from which no tensor can be read
            return
        now = _time_of(values)
        start = begun if self._last is None else tf.maximum(begun, self._last)
        self._spans.append(tf.maximum(now - start, tf.zeros([], tf.float64)))
        self._last = now

    def expect(self, value: Any) -> None:
        """Notes a combined value that is being communicated while the replica computes without it."""
        self._expected = value

    def meet(self, values: Any) -> None:
        """Counts waiting for the expected value, if any, from the time when the replica has `values`."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self.end(self.begin(values), expected)

    def total(self) -> Any:
        """The seconds of all spans, a float64 scalar."""
        return tf.add_n(self._spans) if self._spans else tf.zeros([], tf.float64)


class NoWaits:
    """Measures nothing: the waiting is not needed, or the transport measures it."""

    def begin(self, values: Any) -> Any:
        """Returns None."""

    def end(self, begun: Any, values: Any) -> None:
        """Does nothing."""

    def expect(self, value: Any) -> None:
        """Does nothing."""

    def meet(self, values: Any) -> None:
        """Does nothing."""

    def total(self) -> Any:
        """Returns None: the waiting is not known."""


def _place() -> Any:
    """The graph to which operations are added now; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _time_of(values: Any) -> Any:
    """The time when all tensors of a nest are computed: seconds since 1970, by the host's clock."""
    tensors = [each for each in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(each)]
    with tf.control_dependencies(tensors), tf.device("CPU:0"):
        return tf.timestamp()
