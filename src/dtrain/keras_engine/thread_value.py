"""Thread-local values with a scope, for code that Keras and TensorFlow call back without arguments.

Replicas of a process run in threads, so a replica's context is a value of its thread. It is not for values
that threads share.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ThreadValue(Generic[Value]):
    """A thread-local value; calling the object returns it.

    Args:
        default: the value outside of `set`.
    """

    def __init__(self, default: Value) -> None:
        self._default = default
        self._local = threading.local()

    def __call__(self) -> Value:
        """The value in this thread."""
        found: Value = getattr(self._local, "value", self._default)
        return found

    @contextlib.contextmanager
    def set(self, value: Value) -> Iterator[Value]:
        """A context in which this thread has another value; at its end, the previous value is restored."""
        outer = self()
        self._local.value = value
        try:
            yield value
        finally:
            self._local.value = outer
