"""Counts what a worker hands to the network in the collective calls over sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from dtrain.collectives.calls import Calls
from dtrain.collectives.sockets import SocketCalls


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each collective call that is made inside the context, in a list that grows."""
    calls: list[int] = [0]
    swap_all, barrier = SocketCalls._swap_all, Calls._barrier

    def swapped(self: Any, out: Any, into: Any) -> None:
        calls[-1] += sum(part.nbytes for parts in out for part in parts if part is not None)
        swap_all(self, out, into)

    def begun(self: Any, kind: int, size: int) -> None:
        calls.append(0)
        barrier(self, kind, size)

    SocketCalls._swap_all, Calls._barrier = swapped, begun  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        SocketCalls._swap_all, Calls._barrier = swap_all, barrier  # type: ignore[method-assign]
