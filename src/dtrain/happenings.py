"""What happens in a `fit` that the record of the run should hold, told to whoever writes it.

Each `fit` has listeners of its own, also one that a callback of another `fit` calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]

_fits: list[list[Listener]] = []


@contextlib.contextmanager
def one_fit() -> Iterator[None]:
    """A `fit`: who begins to listen within it hears what is told within it, and no longer."""
    listeners: list[Listener] = []
    _fits.append(listeners)
    try:
        yield
    finally:
        _fits.remove(listeners)


def tell(kind: str, **facts: Any) -> None:
    """Something has happened; nobody need listen.

    Args:
        kind: such as "alarm" or "checkpoint".
        facts: plain data.
    """
    for listener in list(_fits[-1]) if _fits else ():
        listener(kind, facts)


def listen(listener: Listener) -> None:
    """A function is called with the kind and the facts of all that happens, until this `fit` is over."""
    if _fits and listener not in _fits[-1]:
        _fits[-1].append(listener)
