"""A `keras.utils.PyDataset` that `fit` was given, from any batch on, without reading those before.

The order is drawn as Keras draws it; what its batches hold, and what its hooks do, is the user's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dtrain.keras_engine.positions import Place
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.upstream import datasets as upstream_data


def can_be_computed(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether a place in a `PyDataset` says all.

    Threads and processes read ahead; where an epoch does not end with the data, Keras hands what they have
    read on to the next epoch, and how much that is depends on time.
    """
    py_dataset, enqueuer, _ = upstream_data.py_dataset_facts(adapter)
    return enqueuer is None or (steps_per_epoch is None and py_dataset.num_batches is not None)


class PyDatasetSource:
    """Keras' batches of a `PyDataset`.

    Of epochs that are left out no batch is read. `on_epoch_begin` and `on_epoch_end` are called for each of
    them, since users change their data there; random numbers that these draw from Python's or NumPy's global
    generators come again as far as nobody else draws from them during an epoch.

    Args:
        adapter: Keras' adapter, before its dataset was made.
        layout: how the replicas are spread; None under TensorFlow's own strategies.

    Attributes:
        kind: what it is, for messages.
        computed: that any place can be begun with.
        counted: it may have fewer batches than it says.
        dataset: global batches.
    """

    kind = "keras.utils.PyDataset"
    computed = True
    counted = False

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._adapter = adapter
        self._data, self._enqueuer, self._shuffle = upstream_data.py_dataset_facts(adapter)
        self._hooks = upstream_data.has_hooks(self._data)
        self._random: Any = self._common_random(layout)
        # The state of `random` with which the order of the running pass was drawn; None: not drawn yet.
        self._drawn_with: Any = None
        self._taken = 0
        self._again: Any = None
        self._order: Sequence[int] = ()
        self._at_first: Any = None
        self._settled: Any = None
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
        """What must not change for a position to mean anything."""
        return {"shuffle": self._shuffle}

    def starting(self) -> None:
        """The first epoch is about to begin."""
        self._at_first = self._global_states()

    def begin(self, number: int) -> None:
        """The next iterator is for a pass of its own, from its beginning."""
        self._taken, self._again = 0, None

    def rest(self, place: Place) -> Any:
        """What to iterate over, once, for the pass that goes on at the place."""
        return self.dataset

    def state(self) -> dict[str, Any]:
        """What the order follows from, and the generators that hooks may draw from."""
        state: dict[str, Any] = {}
        if self._shuffle:
            state |= {"order": self._drawn_with, "random": self._random.getstate()}
        if self._hooks:
            state |= {"first": self._at_first, "now": self._global_states()}
        return state

    def go_to(self, state: dict[str, Any], place: Place) -> None:
        """Calls the hooks of the epochs before, and takes over the order of the pass that goes on."""
        if self._hooks:
            self._at_first = state["first"] or self._global_states()
            _set_global_states(self._at_first)
            for _ in range(place.whole_epochs):
                self._data.on_epoch_begin()
                if self._shuffle and self._data.num_batches is not None:
                    self._random.shuffle([*range(self._data.num_batches)])
                self._data.on_epoch_end()
        self._drawn_with = state.get("order")
        if place.goes_on:
            self._again, self._taken = self._drawn_with, place.taken
        self._settled = state

    def settle(self) -> None:
        """Leaves the generators as they were at the place that `go_to` was told of."""
        state, self._settled = self._settled, None
        if self._hooks:
            _set_global_states(state["now"])
        if self._shuffle:
            self._random.setstate(state["random"])

    def _global_states(self) -> Any:
        return (random.getstate(), np.random.get_state()) if self._hooks else None

    def _draw(self) -> Sequence[int]:
        """The numbers of the batches of a pass, in order, from the place on."""
        if not self._shuffle:
            return range(self._taken, self._data.num_batches)
        order = [*range(self._data.num_batches)]
        if self._again is None:
            self._drawn_with = self._random.getstate()
            self._random.shuffle(order)
        else:
            generator = random.Random()
            generator.setstate(self._again)
            generator.shuffle(order)
        return order[self._taken :]

    def _ordered(self) -> _Ordered:
        """What threads or processes read: called when they are started, at an epoch's beginning."""
        self._order = self._draw()
        return _Ordered(self._data, self._order)

    def _batches(self) -> Iterator[Any]:
        """The batches of a pass; its order is drawn when the first is asked for, as Keras does it."""
        if self._enqueuer is not None:
            yield from self._enqueued()
            return
        # Shuffling is not for data without an end.
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
    """Some batches of a `PyDataset`, numbered from 0."""

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
