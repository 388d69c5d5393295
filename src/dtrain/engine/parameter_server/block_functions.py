"""The functions that `fit`, `evaluate` and `predict` call for each step under parameter servers.

The signature is Keras': `function(iterator) -> logs`. A call takes batches and returns the newest logs
without waiting for those batches. An epoch's run belongs to its epoch iterator, so a callback may begin
another run of the same function. The session forms the blocks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import Split, rows_of, to_tensors
from dtrain.engine.parameter_server.block_batches import BlockReader
from dtrain.engine.parameter_server.block_program import BlockProgram, BlockTotals
from dtrain.engine.parameter_server.block_sizes import Pace
from dtrain.engine.parameter_server.epoch_session import BlockSession
from dtrain.engine.parameter_server.step_planner import ModelStep
from dtrain.telemetry import events
from dtrain.telemetry.training_clock import clock
from dtrain.upstream import keras_optimizers

_LOGS_SECONDS = 0.1
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class AsynchronousFunction:
    """Trains or tests on the next `steps_per_execution` batches of an iterator.

    Args:
        model: a Keras model under a parameter-server strategy.
        kind: "train" or "test".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model = model
        self._program = BlockProgram(model, model.distribute_strategy, kind)
        if model.jit_compile:
            logger.warning(
                "jit_compile=True was set, but under parameter servers a step sends gradients and receives "
                "weights, which XLA cannot compile. It runs without XLA."
            )
        self._pace = Pace()
        self._runs: list[EpochRun] = []  # those that have begun and not ended
        self._readers: dict[str, BlockReader | None] = {}
        self._finished = BlockTotals()

    @property
    def totals(self) -> BlockTotals:
        """What all finished blocks took and did, including those of running epochs."""
        return functools.reduce(BlockTotals.plus, (run.totals for run in self._runs), self._finished)

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
            run = self._begun(_EagerRun if self._model.run_eagerly else EpochRun, self._new_session())
            try:
                run.take(iterator)
                run.finish()
            except BaseException:
                run.abandon()
                raise
            return run.logs()
        with _counted_as_compute():
            if epochs.needs_run(self):
                epochs.leave_run()
                epochs.run = self._begin(iterator, epochs)
            return epochs.run.call(iterator)

    def note_ended(self, run: EpochRun) -> bool:
        """Counts the blocks of a run that has ended; returns whether it was running."""
        if run not in self._runs:
            return False
        self._runs.remove(run)
        self._finished = self._finished.plus(run.totals)
        return True

    def _begin(self, iterator: Any, epochs: Any) -> EpochRun:
        """Begins an epoch, and decides how its batches are taken."""
        watched = epochs.every_batch
        session = self._new_session(self._model.steps_per_execution if watched else None, epochs.total)
        if self._model.run_eagerly or watched:
            kind = _EagerRun if self._model.run_eagerly else EpochRun
            return self._begun(kind, session, logs_seconds=0.0 if watched else _LOGS_SECONDS)
        spec, key = iterator.element_spec, str(iterator.element_spec)
        if key not in self._readers:
            self._readers[key] = BlockReader(spec) if BlockReader.reads(spec) else None
        reader = self._readers[key]
        if reader is None:
            return self._begun(EpochRun, session)
        return self._begun(functools.partial(_ReadAheadRun, reader), session)

    def _begun(self, kind: Callable[..., EpochRun], session: BlockSession, **options: Any) -> EpochRun:
        run = kind(self, self._program.step, session, **options)
        self._runs.append(run)
        return run

    def _new_session(self, steps_a_call: int | None = None, total: int | None = None) -> BlockSession:
        strategy = self._model.distribute_strategy
        return BlockSession(self._program, strategy, self._pace, steps_a_call=steps_a_call, total=total)


class EpochRun:
    """One epoch of a train or test function, or one call of `train_on_batch`: takes batches one by one.

    Args:
        function: the train or test function.
        step: the model's step.
        session: groups the batches into blocks.
        logs_seconds: how long the logs may be left as they are.

    Attributes:
        function, session: as given.
        ahead: batches that were read for workers, and for which Keras has not made a call yet.
    """

    def __init__(
        self,
        function: AsynchronousFunction,
        step: ModelStep,
        session: BlockSession,
        *,
        logs_seconds: float = _LOGS_SECONDS,
    ) -> None:
        self.function = function
        self.session = session
        self.ahead = 0
        self._step = step
        self._logs: Any = {}
        self._logs_at = 0.0
        self._logs_seconds = logs_seconds
        self._counted = clock.seconds()  # the seconds by part when the epoch began

    @property
    def totals(self) -> BlockTotals:
        """What the finished blocks of this run took and did."""
        return self.session.runner.totals

    def call(self, iterator: Any) -> Any:
        """Takes the batches of one call; returns the newest logs. Raises as `take` does."""
        self.take(iterator)
        self.session.called()
        now = time.monotonic()
        if now - self._logs_at >= self._logs_seconds:
            self.renew_logs()
            self._logs_at = now
        return self._logs

    def take(self, iterator: Any) -> None:
        """Takes the batches of one call.

        Raises:
            StopIteration: there is none.
        """
        for step in range(self._step.model.steps_per_execution):
            try:
                events.emit(events.PartChanges("input"))
                batch = next(iterator)
                events.emit(events.PartChanges("compute"))
            except (StopIteration, tf.errors.OutOfRangeError):
                if step:
                    return
                self._count_failed_call(iterator)
                raise StopIteration from None
            self._add(batch, getattr(iterator, "element_spec", None))
            self._note(1, int(rows_of(Split((batch,), None))))

    def logs(self) -> Any:
        """The newest results: the metrics', or what a step of the user's own returned last."""
        runner = self.session.runner
        runner.assign()
        results = self._step.model.get_metrics_result() if self._step.stock else runner.outputs
        return {} if results is None else keras.tree.map_structure(_number, results)

    def end(self) -> None:
        """Ends the epoch: waits for its blocks, and updates the returned logs to cover the whole epoch."""
        with _counted_as_compute():
            self.finish()
            self.renew_logs()

    def finish(self) -> None:
        """Waits until all steps are done; this run takes no more."""
        self.session.finish()
        self.function.note_ended(self)
        self._count_waiting()

    def abandon(self) -> None:
        """Ends the epoch after an error, and drops the blocks that are not done."""
        self.session.runner.abandon()
        if self.function.note_ended(self):
            self._count_waiting()

    def rest(self) -> bool:
        """Whether the model's state is exactly that after the calls so far, with no step in progress.

        Waits for running blocks first. Returns False if workers have batches for which Keras has not made a
        call yet, or if an update has accumulated only some of its micro-batches.
        """
        return self.ahead == 0 and self.session.rest()

    def renew_logs(self) -> None:
        """Updates the logs in place, because Keras keeps the dictionary that the last call returned."""
        logs = self.logs()
        if isinstance(logs, dict):
            self._logs.clear()
            self._logs.update(logs)
        else:
            self._logs = logs

    def _count_waiting(self) -> None:
        """Counts the waiting for servers as communication."""
        totals = self.totals
        if totals.seconds > 0:
            spent = clock.seconds()["compute"] - self._counted["compute"]
            exchanged = spent * totals.exchange / totals.seconds
            clock.move("compute", "communication", exchanged, since=self._counted)

    def _add(self, batch: Any, spec: Any) -> None:
        self.session.add(batch, spec)

    def _note(self, steps: int, examples: int | None) -> None:
        """Emits an event for batches that are used for training."""
        if self._step.kind == "train":
            events.emit(events.BatchesTaken(steps, examples))

    def _count_failed_call(self, iterator: Any) -> None:
        """Counts the call that found the end of the data as an iteration, as Keras on one device does.

        Only with one worker, whose results equal one device's, and only for data of unknown length.
        """
        model = self._step.model
        if getattr(iterator, "counted", True) or self._step.kind != "train" or model.steps_per_execution > 1:
            return
        optimizer = model.optimizer
        # In a condition, as with a loss scale, nothing is counted before there is data; nor by XLA.
        later = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or model.jit_compile
        later = later or bool(optimizer.gradient_accumulation_steps)
        if model.distribute_strategy.dtrain_managed.layout.workers == 1 and self._step.stock and not later:
            self.session.finish()
            keras_optimizers.iterations_of(optimizer).assign_add(1)


class _ReadAheadRun(EpochRun):
    """Takes the batches of a whole block at once; the following calls count batches of this block."""

    def __init__(self, reader: BlockReader, *given: Any) -> None:
        super().__init__(*given)
        self._reader = reader

    def take(self, iterator: Any) -> None:
        """As `EpochRun.take`."""
        for step in range(self._step.model.steps_per_execution):
            if self.ahead == 0:
                self.ahead = self.session.read(iterator.iterator, self._reader)
                self._note(self.ahead, self.session.examples if self.ahead else 0)
            if self.ahead == 0:
                if step:
                    return
                self._count_failed_call(iterator)
                raise StopIteration
            self.ahead -= 1


class _EagerRun(EpochRun):
    """Runs the steps on the chief, with the servers' variables: `run_eagerly=True` is for debugging."""

    _results: Any = {}

    def logs(self) -> Any:
        """What the last step returned."""
        return self._results

    def _add(self, batch: Any, spec: Any) -> None:
        # Not `self._step`, which leaves the results of Keras' own step to the chief's metrics.
        step = getattr(self._step.model, self._step.name)
        self._results = keras.tree.map_structure(_number, step(to_tensors(batch)))

    def _count_failed_call(self, iterator: Any) -> None:
        """Does nothing: eagerly, Keras counts no such call."""


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
    array = np.asarray(keras.ops.convert_to_numpy(value) if isinstance(value, _COMPOSITE) else value)
    return array.item() if array.ndim == 0 and array.dtype.kind in "fiub" else array
