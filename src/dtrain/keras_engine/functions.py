"""The functions that `fit`, `evaluate` and `predict` call: some steps at a time, from an iterator.

The contract is Keras': `function(iterator) -> logs`, and `StopIteration` when there is no data. What a
step does is `steps.py`'s.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dtrain import progress
from dtrain.errors import DataError
from dtrain.keras_engine.accumulation import SparseGradients, sums_of
from dtrain.keras_engine.asynchronous.functions import AsynchronousFunction, AsynchronousPredict
from dtrain.keras_engine.context import CollectiveUnavailable
from dtrain.keras_engine.input import (
    Split,
    SplitIterator,
    local_parts,
    local_specs,
    split_batch,
    to_tensors,
)
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of, servers_of
from dtrain.keras_engine.steps import StepProgram, step_is_stock, unwrapped, without_optionals
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf


def make_step_function(original: Callable[..., Any], *, training: bool) -> Callable[..., Any]:
    """The replacement of `make_train_function` or `make_test_function`."""
    attribute = "train_function" if training else "test_function"

    def make_function(self: Any, force: bool = False) -> Any:
        if servers_of(self.distribute_strategy) is not None:
            if getattr(self, attribute) is None or force:
                setattr(self, attribute, AsynchronousFunction(self, "train" if training else "test"))
            return getattr(self, attribute)
        layout = layout_of(self.distribute_strategy)
        if layout is None or layout.replicas == 1:
            return _made(original, self, force, attribute)
        if getattr(self, attribute) is None or force:
            setattr(self, attribute, StepFunction(self, layout, training=training))
        return getattr(self, attribute)

    return make_function


def make_predict_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `make_predict_function`."""

    def make_function(self: Any, force: bool = False) -> Any:
        if servers_of(self.distribute_strategy) is not None:
            if self.predict_function is None or force:
                self.predict_function = AsynchronousPredict(self)
            return self.predict_function
        layout = layout_of(self.distribute_strategy)
        if layout is None or layout.replicas == 1:
            return _made(original, self, force, "predict_function")
        if self.predict_function is None or force:
            self.predict_function = _noted(PredictFunction(self, layout), self, train=False)
        return self.predict_function

    return make_function


def _made(original: Callable[..., Any], model: Any, force: bool, attribute: str) -> Any:
    """Keras' own function, and what Keras' own `make_..._function` returns."""
    before = None if force else getattr(model, attribute)
    result = original(model, force)
    made = getattr(model, attribute)
    if made is not before:
        setattr(model, attribute, _noted(made, model, train=attribute == "train_function"))
    return result


def _noted(function: Any, model: Any, *, train: bool) -> Any:
    """The function itself where nobody watches."""
    return NotedFunction(function, model, train=train) if progress.watched() else function


class NotedFunction:
    """A function that `fit`, `evaluate` or `predict` calls, with a note of each call for whoever watches."""

    def __init__(self, function: Any, model: Any, *, train: bool) -> None:
        self._function = function
        self._model = model
        self._train = train
        self._called = False

    def __call__(self, data: Any) -> Any:
        """What the function returns for an iterator, or for a list of batches.

        Raises:
            StopIteration: if the iterator has no batch left; or OutOfRangeError.
        """
        if self._train:
            _note_first_step(self._model)
        progress.input_begins(data)
        reading = progress.step_begins()
        try:
            outputs = self._function(data)
        except BaseException:
            progress.phase("callbacks")
            raise
        steps = self._model.steps_per_execution
        progress.step_ends(reading, None, train=self._train, usual=self._called, steps=steps)
        progress.call_ends(train=self._train)
        self._called = True
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _note_first_step(model: Any) -> None:
    """The first step of a `fit` says where the training stands, which a checkpoint may have set."""
    if not progress.needs_step():
        return
    done = 0
    if progress.watched():
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        with contextlib.suppress(AttributeError):  # an optimizer of the user's own need not count
            done = int(upstream_keras.iterations_of(optimizer).numpy())
    progress.training_from(done)


class _Batch(NamedTuple):
    """A batch for each replica of this process.

    Attributes:
        parts: by replica.
        total: examples over all processes, or None if the step has to find out.
        specs: what its step is traced for, or None.
        reading: seconds until it was there.
    """

    parts: Any
    total: Any
    specs: Any
    reading: float


class StepFunction:
    """Trains or tests on the next `steps_per_execution` batches of an iterator."""

    def __init__(self, model: Any, layout: ReplicaLayout, *, training: bool) -> None:
        self._model = model
        self._layout = layout
        self._training = training
        self._compiled = self._can_compile()
        self._sparse = False  # whether gradients that name rows were found where micro-batches are summed up
        self._build()

    @property
    def findings(self) -> dict[str, Any] | None:
        """What was found out of the user's own losses (`StepProgram.findings`), for those who go on later."""
        return self._program.findings

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._program.findings = found

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps; returns their logs.

        Raises:
            StopIteration: if the iterator has no batch left.
        """
        if self._training:
            _note_first_step(self._model)
        batches = self._batches(iterator)
        first = next(batches, None)
        if first is None:
            progress.phase("callbacks")
            raise StopIteration
        outputs = None
        self._program.learn(first.parts[0])
        for batch in itertools.chain([first], batches):
            traced = len(self._functions)
            outputs, waited = self._step(batch.parts, batch.total, batch.specs)
            progress.step_ends(
                batch.reading,
                None if waited is None else float(waited),
                train=self._training,
                usual=len(self._functions) == traced,
            )
        outputs = self._results() if self._program.stock else outputs
        progress.call_ends(train=self._training)
        return outputs

    def _batches(self, iterator: Any) -> Iterator[_Batch]:
        """Up to `steps_per_execution` batches."""
        strategy = self._model.distribute_strategy
        for _ in range(self._model.steps_per_execution):
            progress.input_begins(iterator)
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                progress.step_begins()
                self._count_failed_call(iterator)
                return
            reading = progress.step_begins()
            if isinstance(iterator, SplitIterator):
                yield _Batch(batch.parts, batch.total, iterator.element_spec, reading)
            elif isinstance(iterator, tf.distribute.DistributedIterator):
                # The whole batch's size is found in the step: TensorFlow made the split.
                specs = (local_specs(strategy, iterator.element_spec), None)
                yield _Batch(local_parts(strategy, batch), None, specs, reading)
            else:
                parts, total = split_batch(to_tensors(batch), self._layout)
                yield _Batch(parts, total, None, reading)

    def _step(self, parts: Any, total: Any, specs: Any) -> tuple[Any, Any]:
        """The outputs of one step, and the seconds that it waited for other workers, or None."""
        sums = sums_of(self._model) if self._training and self._program.stock and not self._sparse else None
        phase = None if sums is None else sums.next_phase()
        try:
            outputs = self._function(specs, phase)(parts, total)
            if sums is not None and phase is not None:
                sums.note(phase)
            return outputs
        except SparseGradients:
            # Found while tracing, too.
            self._sparse = True
            if sums is not None:
                sums.close()
            return self._step(parts, total, specs)
        except CollectiveUnavailable:
            # Found while tracing, before anything ran: replicas must meet inside forward or backward.
            logger.warning(
                "jit_compile=True was set, but this model's replicas must talk to each other inside the "
                "step (a masked or whole-batch loss, synchronized BatchNormalization), which XLA cannot "
                "compile; it runs without XLA."
            )
            self._program.compiled = False
            self._functions.clear()
            return self._step(parts, total, specs)

    def _function(self, specs: Any, phase: str | None) -> Callable[..., Any]:
        """The step, traced once for data of these specs: a short last batch must not change its shapes."""

        def run(parts: Any, total: Any) -> Any:
            return self._program.run(parts, total, phase)

        if self._model.run_eagerly:
            return run
        key = f"{specs} {phase}"
        if key not in self._functions:
            signature = None if specs is None else [specs[0], specs[1]]
            if signature is not None and signature[1] is None:
                parts_only = tf.function(lambda parts: run(parts, None), signature[:1], autograph=False)
                self._functions[key] = lambda parts, total: parts_only(parts)
            else:
                self._functions[key] = tf.function(
                    run, signature, autograph=False, reduce_retracing=signature is None
                )
        return self._functions[key]

    def _build(self) -> None:
        self._program = StepProgram(
            self._model,
            self._layout,
            training=self._training,
            compiled=self._compiled,
            measured=self._training and self._layout.workers > 1 and progress.watched(),
        )
        self._functions: dict[str, Callable[..., Any]] = {}
        self._results: Callable[..., Any] = self._program.results
        if not self._model.run_eagerly:
            self._results = tf.function(self._results, autograph=False)

    def _count_failed_call(self, iterator: Any) -> None:
        """On one device the call that finds the data at its end still counts as an iteration.

        There the counter is raised beside the failing read. Schedules and Adam's bias correction read the
        counter, so it must be the same here.
        """
        model = self._model
        uncounted = isinstance(iterator, SplitIterator) and not iterator.counted
        if not (uncounted and self._training and model.steps_per_execution == 1 and not model.run_eagerly):
            return
        optimizer = model.optimizer
        if self._program.stock and not isinstance(optimizer, upstream_keras.loss_scale_optimizer()):
            upstream_keras.iterations_of(optimizer).assign_add(1)

    def _can_compile(self) -> bool:
        model = self._model
        if not model.jit_compile or model.run_eagerly:
            return False
        name = "train_step" if self._training else "test_step"
        if self._layout.central:
            logger.warning(
                "jit_compile=True was set, but a program that XLA compiles reads weights on its own device "
                "only, and under central storage they are on another. It runs without XLA."
            )
            return False
        if step_is_stock(model, name):
            return True
        logger.warning(
            "jit_compile=True was set, but the model overrides %s; under several replicas only Keras' own "
            "step is compiled by XLA, since the reduction stands in the middle of it. It runs without XLA.",
            name,
        )
        return False


class PredictFunction:
    """Predicts for a list of batches; outputs come in the order of the examples, from all workers."""

    def __init__(self, model: Any, layout: ReplicaLayout) -> None:
        self._model = model
        self._layout = layout
        self._one: Callable[..., Any] = self._one_batch
        if not model.run_eagerly:
            self._one = tf.function(self._one_batch, reduce_retracing=True, autograph=False)

    def __call__(self, batches: list[Any]) -> Any:
        """Outputs of all batches, concatenated; each of shape (examples, ...)."""
        outputs = [self._one(self._parts(batch)) for batch in batches]
        return keras.tree.map_structure(lambda *each: _concat(list(each)), *outputs)

    def _parts(self, batch: Any) -> tuple[Any, ...]:
        if isinstance(batch, Split):
            return tuple(batch.parts)
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in keras.tree.flatten(batch)):
            return local_parts(self._model.distribute_strategy, batch)
        return split_batch(to_tensors(batch), self._layout)[0]

    def _one_batch(self, parts: tuple[Any, ...]) -> Any:
        model, strategy = self._model, self._model.distribute_strategy
        step = unwrapped(model.predict_step)

        def in_replica(part: Any) -> Any:
            return step(without_optionals(part))

        outputs = strategy.run(in_replica, args=(upstream_tf.per_replica(list(parts)),))
        return keras.tree.map_structure(lambda value: self._joined(strategy, value), outputs)

    def _joined(self, strategy: Any, value: Any) -> Any:
        if self._layout.workers > 1:
            return _gather(strategy, value)
        return _concat(list(strategy.experimental_local_results(value)))


def _gather(strategy: Any, value: Any) -> Any:
    """Puts the rows of all workers' replicas together, in the replicas' order."""
    each = strategy.experimental_local_results(value)
    if isinstance(each[0], tf.RaggedTensor):
        lengths = _gather(strategy, _each(each, lambda v: v.row_lengths()))
        return tf.RaggedTensor.from_row_lengths(_gather(strategy, _each(each, lambda v: v.values)), lengths)
    if isinstance(each[0], tf.SparseTensor) or each[0].dtype == tf.string:
        raise DataError(
            f"predict returned {type(each[0]).__name__} of {each[0].dtype.name}, which cannot be gathered "
            "from several workers.",
            hint="return dense numbers from the model, or predict on one worker",
        )
    if each[0].dtype == tf.bool:
        return tf.cast(_gather(strategy, _each(each, lambda v: tf.cast(v, tf.int32))), tf.bool)
    if each[0].shape.rank == 0:
        return _gather(strategy, _each(each, lambda v: tf.reshape(v, [1])))
    return strategy.gather(value, axis=0)


def _each(values: Any, function: Callable[[Any], Any]) -> Any:
    return upstream_tf.per_replica([function(v) for v in values])


def _concat(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=values)
    if isinstance(values[0], tf.RaggedTensor):
        return tf.concat(values, axis=0)
    return tf.stack(values) if values[0].shape.rank == 0 else tf.concat(values, axis=0)
