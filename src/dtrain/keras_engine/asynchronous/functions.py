"""The functions that `fit`, `evaluate` and `predict` call for each step under parameter servers.

The signature is Keras': `function(iterator) -> logs`. A call takes batches and returns the newest logs
without waiting for those batches; `end` waits for all batches of the epoch. The session forms the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain import events
from dtrain.keras_engine.asynchronous.batches import BlockReader
from dtrain.keras_engine.asynchronous.block_sizes import Pace
from dtrain.keras_engine.asynchronous.program import BlockProgram
from dtrain.keras_engine.asynchronous.runner import BlockTimes, Staleness
from dtrain.keras_engine.asynchronous.session import BlockSession
from dtrain.keras_engine.input import Split, rows_of, to_tensors
from dtrain.log import logger
from dtrain.time_breakdown import breakdown
from dtrain.upstream import keras as upstream_keras

_LOGS_SECONDS = 0.1
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class AsynchronousFunction:
    """Trains or tests on the next `steps_per_execution` batches of an iterator.

    Args:
        model: a Keras model under a parameter-server strategy.
        kind: "train" or "test".

    Attributes:
        every_batch: whether a callback needs the results of every call.
        staleness: the staleness of the last finished epoch.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        self._kind = kind
        self._program = BlockProgram(model, self._strategy, kind)
        if model.jit_compile:
            logger.warning(
                "jit_compile=True was set, but in a step under parameter servers worker and servers meet, "
                "which XLA cannot compile. It runs without XLA."
            )
        self._pace = Pace()
        self._session: BlockSession | None = None
        self._logs: Any = {}
        self._eager_logs: Any = {}
        self._ahead = 0  # batches that were read for workers, and for which Keras has not made a call yet
        self._readers: dict[str, BlockReader | None] = {}
        self._reader: BlockReader | None = None
        self._read_from: Any = None
        self._logs_at = 0.0
        self._counted = breakdown.seconds()  # the time breakdown when the epoch began
        self._times = BlockTimes()
        self.every_batch = False
        self.staleness = Staleness()

    @property
    def times(self) -> BlockTimes:
        """The durations of all finished blocks, including those of the running epoch."""
        session = self._session
        return self._times if session is None else self._times.plus(session.runner.times)

    @property
    def between_blocks(self) -> bool:
        """Whether Keras has made the calls for all batches that were read."""
        return self._ahead == 0

    @property
    def turns(self) -> set[int]:
        """As `BlockProgram.turns`."""
        return self._program.turns

    def __call__(self, iterator: Any) -> Any:
        """Takes batches, and returns the newest logs.

        The logs are a dictionary that later calls update in place, or what a step of the user's returned.

        Raises:
            StopIteration: the iterator has no batch left.
        """
        epochs = getattr(iterator, "epochs", None)
        if epochs is None:
            # train_on_batch and test_on_batch: the step is done when the call returns.
            single = self._new_session(None)
            self._take_each(single, iterator)
            single.finish()
            self._times = self._times.plus(single.runner.times)
            return self._logs_of(single)
        if epochs.function is None:
            epochs.function = self
            self._session = self._new_session(epochs.total)
            self._counted = breakdown.seconds()
            self._ahead = 0
            self._logs, self._logs_at = {}, 0.0
        session = self._session
        if session is None:
            raise RuntimeError("an epoch goes on after its end")
        with _counted_as_compute():
            reader = self._reader_of(iterator)
            if reader is None:
                self._take_each(session, iterator)
            else:
                self._take_ahead(session, iterator, reader)
            session.called()
            self._refresh_logs(session)
        return self._logs

    def end(self) -> None:
        """Ends the epoch: waits for its blocks, and updates the returned logs to cover the whole epoch."""
        session, self._session = self._session, None
        if session is not None:
            with _counted_as_compute():
                session.finish()
                self.staleness = session.runner.staleness
                self._note_times(session)
                self._renew_logs(session)

    def rest(self) -> bool:
        """Whether the model's state is exactly that after the calls so far, with no step in progress.

        Waits for running blocks first. Returns False if workers have batches for which Keras has not made a
        call yet, or if an update has accumulated only some of its micro-batches.
        """
        return self._session is None or (self._ahead == 0 and self._session.rest())

    def abandon(self) -> None:
        """Ends the epoch after an error, and drops the blocks that are not done."""
        session, self._session = self._session, None
        if session is not None:
            session.runner.abandon()
            self._note_times(session)

    def _reader_of(self, iterator: Any) -> BlockReader | None:
        """The reader that takes an iterator's batches in blocks; None if batches must be taken one by one."""
        if self.every_batch or self._model.run_eagerly or not isinstance(iterator, EpochBatches):
            return None
        if iterator is not self._read_from:
            spec, key = iterator.element_spec, str(iterator.element_spec)
            if key not in self._readers:
                self._readers[key] = BlockReader(spec) if BlockReader.reads(spec) else None
            self._read_from, self._reader = iterator, self._readers[key]
        return self._reader

    def _take_each(self, session: BlockSession, iterator: Any) -> None:
        """Takes the batches of one call one by one."""
        for step in range(self._model.steps_per_execution):
            try:
                events.emit(events.PartChanges("input"))
                batch = next(iterator)
                events.emit(events.PartChanges("compute"))
            except (StopIteration, tf.errors.OutOfRangeError):
                if step:
                    return
                self._count_failed_call(session, iterator)
                raise StopIteration from None
            if self._model.run_eagerly:
                self._eager(batch)
            else:
                session.add(batch, getattr(iterator, "element_spec", None))
            self._note(1, int(rows_of(Split((batch,), None))))

    def _take_ahead(self, session: BlockSession, iterator: Any, reader: BlockReader) -> None:
        """Takes the batches of a whole block; the following calls count batches of this block."""
        for step in range(self._model.steps_per_execution):
            if self._ahead == 0:
                self._ahead = session.read(iterator.iterator, reader)
                self._note(self._ahead, session.examples if self._ahead else 0)
            if self._ahead == 0:
                if step:
                    return
                self._count_failed_call(session, iterator)
                raise StopIteration
            self._ahead -= 1

    def _note(self, steps: int, examples: int | None) -> None:
        """Emits an event for batches that are used for training."""
        if self._kind == "train":
            events.emit(events.BatchesTaken(steps, examples))

    def _note_times(self, session: BlockSession) -> None:
        """Adds an epoch's block times; counts the workers' waiting for servers as communication."""
        times = session.runner.times
        self._times = self._times.plus(times)
        if times.seconds > 0:
            spent = breakdown.seconds()["compute"] - self._counted["compute"]
            exchanged = spent * times.exchange / times.seconds
            breakdown.move("compute", "communication", exchanged, since=self._counted)

    def _count_failed_call(self, session: BlockSession, iterator: Any) -> None:
        """Counts the call that found the end of the data as an iteration, as Keras on one device does.

        Only with one worker, whose results equal one device's, and only for data of unknown length.
        """
        model = self._model
        counted = getattr(iterator, "counted", True)
        if counted or self._kind != "train" or model.steps_per_execution > 1 or model.run_eagerly:
            return
        scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        if self._strategy.dtrain_servers.workers == 1 and self._program.stock and not scaled:
            session.flush()
            session.finish()
            upstream_keras.iterations_of(model.optimizer).assign_add(1)

    def _eager(self, batch: Any) -> None:
        """Runs the step on the chief, with the servers' variables: `run_eagerly=True` is for debugging."""
        step = self._model.train_step if self._kind == "train" else self._model.test_step
        self._eager_logs = keras.tree.map_structure(_number, step(to_tensors(batch)))

    def _new_session(self, total: int | None) -> BlockSession:
        watched = self._model.steps_per_execution if self.every_batch else None
        return BlockSession(self._program, self._strategy, self._pace, steps_a_call=watched, total=total)

    def _refresh_logs(self, session: BlockSession) -> None:
        now = time.monotonic()
        if self.every_batch or now - self._logs_at >= _LOGS_SECONDS:
            self._renew_logs(session)
            self._logs_at = now

    def _renew_logs(self, session: BlockSession) -> None:
        """Updates the logs in place, because Keras keeps the dictionary that the last call returned."""
        found = self._logs_of(session)
        if isinstance(found, dict):
            self._logs.clear()
            self._logs.update(found)
        else:
            self._logs = found

    def _logs_of(self, session: BlockSession) -> Any:
        if self._model.run_eagerly:
            return self._eager_logs
        session.runner.store()
        results = self._model.get_metrics_result() if self._program.stock else session.runner.outputs
        return {} if results is None else keras.tree.map_structure(_number, results)


class AsynchronousPredict:
    """Predicts for a list of batches: one batch after another, each on a free worker.

    Args:
        model: a Keras model under a parameter-server strategy.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._program = BlockProgram(model, model.distribute_strategy, "predict")
        self._pace = Pace()

    def __call__(self, batches: list[Any]) -> Any:
        """Returns the concatenated outputs of all batches, each of shape (examples, ...)."""
        outputs = [self._one(to_tensors(batch)) for batch in batches]
        return keras.tree.map_structure(lambda *each: tf.concat(each, axis=0), *outputs)

    def _one(self, batch: Any) -> Any:
        if self._model.run_eagerly:
            return self._model.predict_step(batch)
        strategy = self._model.distribute_strategy
        session = BlockSession(self._program, strategy, self._pace, steps_a_call=1, total=1)
        session.add(batch, alone=True)
        session.finish()
        return session.runner.outputs


class EpochBatches:
    """An iterator over the batches of one pass through a dataset.

    Attributes:
        element_spec: the spec of a batch.
        epochs: the epoch iterator that the batches belong to.
        counted: whether the number of batches is known beforehand.
        iterator: TensorFlow's iterator.
    """

    def __init__(self, iterator: Any, epochs: Any, *, counted: bool) -> None:
        self.iterator = iterator
        self.element_spec = iterator.element_spec
        self.epochs = epochs
        self.counted = counted

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


@contextmanager
def _counted_as_compute() -> Iterator[None]:
    """Counts the time inside the context as computing, and the time after it as callbacks."""
    events.emit(events.PartChanges("compute"))
    try:
        yield
    finally:
        events.emit(events.PartChanges("callbacks"))


def _number(value: Any) -> Any:
    # Ragged and sparse values become dense arrays, as Keras makes them on one device.
    found = np.asarray(keras.ops.convert_to_numpy(value) if isinstance(value, _COMPOSITE) else value)
    return found.item() if found.ndim == 0 and found.dtype.kind in "fiub" else found
