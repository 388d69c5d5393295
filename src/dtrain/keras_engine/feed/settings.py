"""Passes settings from dtrain's `fit` to the iterator of epochs that Keras makes inside it.

Keras gives that iterator only the data, so the settings go by a context variable. Nothing else is passed this
way.
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
    """The settings of one iterator of epochs.

    Attributes:
        every_batch: whether each call runs one step, because a callback needs each batch.
        session: is called between the steps.
        model: the model that a `fit` trains with the iterator; None for an iterator of validation data, of
            `evaluate` or of `predict`.
        epochs: the number of epochs of that `fit`.
    """

    every_batch: bool = True
    session: FitSession = field(default_factory=NoSession)
    model: Any = None
    epochs: int = 0


_settings: ContextVar[list[FeedSettings] | None] = ContextVar("settings", default=None)


@contextlib.contextmanager
def feeding(first: FeedSettings, following: FeedSettings | None = None) -> Iterator[None]:
    """A context in which the first iterator of epochs gets `first`, and later ones `following`, if given."""
    token = _settings.set([first] if following is None else [first, following])
    try:
        yield
    finally:
        _settings.reset(token)


def take_settings() -> FeedSettings:
    """The settings for the iterator that is being made; removes them if later iterators get others."""
    left = _settings.get()
    if left is None:
        return FeedSettings()
    return left.pop(0) if len(left) > 1 else left[0]
