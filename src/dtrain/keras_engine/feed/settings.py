"""What the iterator of epochs that is made next is for.

Keras makes that iterator inside `fit`, `evaluate` and `predict`, and gives it no more than the data. This is
the one place in which the caller of `fit` leaves it something.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from dtrain.keras_engine.between_steps import FitSession, NoSession


@dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """What one iterator of epochs is for.

    Attributes:
        every_batch: whether each call makes one step, because a callback looks at each batch.
        session: takes part between the steps.
        model: which a `fit` trains with it; None for an iterator that is not the `fit`'s own.
        epochs: of that `fit`.
    """

    every_batch: bool = True
    session: FitSession = field(default_factory=NoSession)
    model: Any = None
    epochs: int = 0


_settings: ContextVar[list[FeedSettings] | None] = ContextVar("settings", default=None)


@contextlib.contextmanager
def feeding(first: FeedSettings, following: FeedSettings | None = None) -> Iterator[None]:
    """Within it the first iterator of epochs gets `first`; all others get `following`, or `first` too."""
    token = _settings.set([first] if following is None else [first, following])
    try:
        yield
    finally:
        _settings.reset(token)


def take_settings() -> FeedSettings:
    """The settings of the iterator that is being made."""
    left = _settings.get()
    if left is None:
        return FeedSettings()
    return left.pop(0) if len(left) > 1 else left[0]
