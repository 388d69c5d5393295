"""Values of a thread's own, for where Keras and TensorFlow call back without arguments.

Replicas of a process run in threads, so what one of them is doing is a value of its thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ThreadValue(Generic[Value]):
    """A value that each thread has for itself; calling it gives the value.

    Args:
        default: what it is outside of `set`.
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
        """While it is entered, the value in this thread is another one."""
        outer = self()
        self._local.value = value
        try:
            yield value
        finally:
            self._local.value = outer
