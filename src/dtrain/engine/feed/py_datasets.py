"""A `keras.utils.PyDataset` as a source of batches, read from any batch without reading earlier ones.

The order is drawn as Keras draws it. The content of a batch and the dataset's hooks are the user's, not
decided here.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dtrain.base.log import logger
from dtrain.engine.feed.position import DataPosition
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_adapters


def can_be_opened(adapter: Any, steps_per_epoch: int | None) -> bool:
    """Whether reading a `PyDataset` can begin at any batch.

    It cannot if worker threads or processes read ahead and an epoch does not end with the data: Keras then
    keeps the batches that they have read for the next epoch, and their number depends on timing.

    Args:
        adapter: Keras' data adapter.
        steps_per_epoch: the argument of `fit`, or None.
    """
    py_dataset, enqueuer, _ = keras_adapters.py_dataset_facts(adapter)
    return enqueuer is None or (steps_per_epoch is None and py_dataset.num_batches is not None)


class PyDatasetSource:
    """The batches that Keras reads from a `PyDataset`.

    When training resumes, no batch of a skipped epoch is read. `on_epoch_begin` and `on_epoch_end` are called
    for each skipped epoch, because users change their data there. Random numbers that these hooks draw from
    the global generators of Python or NumPy are repeated, unless other code draws from them during an epoch.

    Args:
        adapter: Keras' data adapter, before it has made its dataset.
        layout: how the replicas are distributed; None under TensorFlow's own strategies.

    Attributes:
        kind, dataset: as of a `Source`.
        counted: False, because the data may have fewer batches than `num_batches`.
    """

    kind = "keras.utils.PyDataset"
    counted = False

    def __init__(self, adapter: Any, layout: ReplicaLayout | None) -> None:
        self._adapter = adapter
        self._data, self._enqueuer, self._shuffle = keras_adapters.py_dataset_facts(adapter)
        self._hooks = keras_adapters.has_hooks(self._data)
        self._random: Any = self._common_random(layout)
        # The state of `_random` before the order of the running pass was drawn; None if not drawn yet.
        self._drawn_with: Any = None
        self._taken = 0  # batches of the pass that are skipped
        self._redrawn_with: Any = None  # as `_drawn_with`, for a pass that began before the restart
        self._order: Sequence[int] = ()
        self._at_first: Any = None  # states of the global generators before the first epoch
        keras_adapters.read_instead(adapter, self._batches)
        if self._enqueuer is not None:
            keras_adapters.in_order(self._enqueuer, self._ordered)
            if not self._data.use_multiprocessing:
                self._enqueuer.executor_fn = lambda _: _Threads(self._data.workers)
        self.dataset = adapter.get_tf_dataset()

    def _common_random(self, layout: ReplicaLayout | None) -> Any:
        """Python's global generator, or one with a common seed if the workers' global generators differ."""
        if not self._shuffle or layout is None or layout.workers == 1:
            return random
        states = exchange(layout, hash(random.getstate()[1]))
        if all(state == states[0] for state in states):
            return random
        logger.info(
            "Python's random numbers differ by worker, so all workers shuffle the PyDataset as "
            "the first one does."
        )
        return random.Random(states[0])

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As `Source.fingerprint`."""
        return {"shuffle": self._shuffle}

    def start(self) -> None:
        """Records the states of the global generators, from which hooks may draw."""
        self._at_first = self._global_states()

    def begin(self, number: int) -> None:
        """As `Source.begin`."""
        self._taken, self._redrawn_with = 0, None

    def state(self) -> dict[str, Any]:
        """As `Source.state`: the states for the order, and of the generators that hooks may draw from."""
        state: dict[str, Any] = {}
        if self._shuffle:
            state |= {"order": self._drawn_with, "random": self._random.getstate()}
        if self._hooks:
            state |= {"first": self._at_first, "now": self._global_states()}
        return state

    @contextlib.contextmanager
    def open(self, position: DataPosition, state: dict[str, Any]) -> Iterator[Any]:
        """As `Source.open`: calls the hooks of skipped epochs, and restores the generators on exit."""
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
        """The numbers of a pass' batches, in order, from the first one that is not skipped."""
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
        """The batches for worker threads or processes to read; called when they start, as an epoch begins."""
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
            yield keras_adapters.standard_batch(self._adapter, self._data[number])

    def _enqueued(self) -> Iterator[Any]:
        self._enqueuer.start()
        left = len(self._order)
        if left == 0:
            return
        for batch in self._enqueuer.get():
            yield keras_adapters.standard_batch(self._adapter, batch)
            left -= 1
            if left == 0:
                self._enqueuer.stop()
                return


class _Ordered:
    """A view of some batches of a `PyDataset`, in another order, with indices from 0."""

    def __init__(self, data: Any, order: Sequence[int]) -> None:
        self._data = data
        self._order = order
        self.num_batches = len(order)

    def __getitem__(self, number: int) -> Any:
        return self._data[self._order[number]]


class _Threads:
    """The threads that read batches, with the methods of `multiprocessing.pool.ThreadPool` that Keras calls.

    That pool makes a lock between processes, for which /dev/shm must have room.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: queue.SimpleQueue[tuple[_Result, Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name="dtrain-py-dataset", daemon=True).start()

    def apply_async(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Result:
        """Calls a function in a thread."""
        result = _Result()
        self._calls.put((result, function, args))
        return result

    def close(self) -> None:
        """Ends the threads when all calls are made."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, function, args = call
            try:
                result.set_result(function(*args))
            except BaseException as error:  # whoever waits for the result gets it
                result.set_exception(error)
            del call, result  # a waiting thread keeps no batch


class _Result(Future[Any]):
    """What a call in a thread will return."""

    get = Future.result


def _set_global_states(states: Any) -> None:
    python, numpy = states
    random.setstate(python)
    np.random.set_state(numpy)
