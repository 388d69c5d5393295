"""The class of epoch iterators that Keras' trainer makes: over a data feed, or that of parameter servers."""

from __future__ import annotations

from typing import Any

from dtrain.engine.feed.data_feed import DataFeed
from dtrain.interfaces.managed_strategy import managed


def make_epoch_iterator(original: Any) -> Any:
    """The replacement of the trainer's epoch iterator class."""

    class EpochIterator(DataFeed, original):  # type: ignore[misc]
        """Keras' epoch iterator, over the batches of a data feed."""

        def __new__(cls, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> Any:
            engine = managed(distribute_strategy).asynchronous
            return super().__new__(cls if engine is None else engine.epochs(EpochIterator))

    EpochIterator.__name__, EpochIterator.__qualname__ = original.__name__, original.__qualname__
    return EpochIterator
