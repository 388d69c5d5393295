"""A `keras.utils.PyDataset` as a source of batches, read from any batch on without those before it.

The order is drawn as Keras draws it; what a batch holds, and what the hooks of the dataset do, is the user's.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dtrain.keras_engine.feed.position import DataPosition
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.upstream import datasets as upstream_data


def can_be_opened(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether reading a `PyDataset` can begin at any batch.

    Threads and processes read ahead. If an epoch does not end with the data, Keras keeps what they have read
    for the next epoch, and how much that is depends on time.
    """
    py_dataset, enqueuer, _ = upstream_data.py_dataset_facts(adapter)
    return enqueuer is None or (steps_per_epoch is None and py_dataset.num_batches is not None)


class PyDatasetSource:
    """The batches that Keras reads from a `PyDataset`.

    No batch of a skipped epoch is read. `on_epoch_begin` and `on_epoch_end` are called for each skipped
    epoch, because users change their data there. Random numbers that these hooks draw from the global
    generators of Python or NumPy are repeated, unless something else draws from them during an epoch.

    Args:
        adapter: Keras' adapter, before its dataset was made.
        layout: how the replicas are spread; None under TensorFlow's own strategies.

    Attributes:
        kind, dataset: as of a `Source`.
        counted: False: the data may have fewer batches than it says.
    """

    kind = "keras.utils.PyDataset"
    counted = False

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._adapter = adapter
        self._data, self._enqueuer, self._shuffle = upstream_data.py_dataset_facts(adapter)
        self._hooks = upstream_data.has_hooks(self._data)
        self._random: Any = self._common_random(layout)
        # The state of `random` before the order of the running pass was drawn; None: not drawn yet.
        self._drawn_with: Any = None
        self._taken = 0  # batches of the pass that are skipped
        self._redrawn_with: Any = None  # as `_drawn_with`, for a pass that began in another process
        self._order: Sequence[int] = ()
        self._at_first: Any = None  # states of the global generators before the first epoch
        upstream_data.read_instead(adapter, self._batches)
        if self._enqueuer is not None:
            upstream_data.in_order(self._enqueuer, self._ordered)
        self.dataset = adapter.get_tf_dataset()

    def _common_random(self, layout: ReplicaLayout | None) -> Any:
        """Python's global generator, or one for all workers where they have seeded that differently."""
        if not self._shuffle or layout is None or layout.workers == 1:
            return random
        states = exchange(layout, hash(random.getstate()[1]))
        if all(state == states[0] for state in states):
            return random
        logger.info("Python's random numbers differ by worker, so all shuffle the PyDataset as the first.")
        return random.Random(states[0])

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return {"shuffle": self._shuffle}

    def start(self) -> None:
        """Notes the states of the generators that hooks may draw from."""
        self._at_first = self._global_states()

    def begin(self, number: int) -> None:
        """As `Source.begin`."""
        self._taken, self._redrawn_with = 0, None

    def state(self) -> dict[str, Any]:
        """As `Source.state`: of the order, and of the generators that hooks may draw from."""
        state: dict[str, Any] = {}
        if self._shuffle:
            state |= {"order": self._drawn_with, "random": self._random.getstate()}
        if self._hooks:
            state |= {"first": self._at_first, "now": self._global_states()}
        return state

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[Any]:
        """As `Source.open`: calls the hooks of the skipped epochs; restores the generators at the end."""
        if self._hooks:
            self._at_first = state["first"] or self._global_states()
            _set_global_states(self._at_first)
            for _ in range(position.whole_epochs):
                self._data.on_epoch_begin()
                if self._shuffle and self._data.num_batches is not None:
                    self._random.shuffle([*range(self._data.num_batches)])
                self._data.on_epoch_end()
        self._drawn_with = state.get("order")
        if position.goes_on:
            self._redrawn_with, self._taken = self._drawn_with, position.taken
        yield self.dataset
        if self._hooks:
            _set_global_states(state["now"])
        if self._shuffle:
            self._random.setstate(state["random"])

    def _global_states(self) -> Any:
        return (random.getstate(), np.random.get_state()) if self._hooks else None

    def _draw(self) -> Sequence[int]:
        """The numbers of the batches of a pass, in order, from the first that is not skipped."""
        if not self._shuffle:
            return range(self._taken, self._data.num_batches)
        order = [*range(self._data.num_batches)]
        if self._redrawn_with is None:
            self._drawn_with = self._random.getstate()
            self._random.shuffle(order)
        else:
            generator = random.Random()
            generator.setstate(self._redrawn_with)
            generator.shuffle(order)
        return order[self._taken :]

    def _ordered(self) -> _Ordered:
        """What threads or processes read; called when they are started, at the beginning of an epoch."""
        self._order = self._draw()
        return _Ordered(self._data, self._order)

    def _batches(self) -> Iterator[Any]:
        """The batches of a pass; its order is drawn at the first read, as in Keras."""
        if self._enqueuer is not None:
            yield from self._enqueued()
            return
        # Keras does not shuffle endless data.
        endless = self._data.num_batches is None
        for number in itertools.count(self._taken) if endless else self._draw():
            yield upstream_data.standard_batch(self._adapter, self._data[number])

    def _enqueued(self) -> Iterator[Any]:
        self._enqueuer.start()
        left = len(self._order)
        if left == 0:
            return
        for batch in self._enqueuer.get():
            yield upstream_data.standard_batch(self._adapter, batch)
            left -= 1
            if left == 0:
                self._enqueuer.stop()
                return


class _Ordered:
    """Some batches of a `PyDataset`, with indices from 0."""

    def __init__(self, data: Any, order: Sequence[int]) -> None:
        self._data = data
        self._order = order
        self.num_batches = len(order)

    def __getitem__(self, number: int) -> Any:
        return self._data[self._order[number]]


def _set_global_states(states: Any) -> None:
    python, numpy = states
    random.setstate(python)
    np.random.set_state(numpy)
