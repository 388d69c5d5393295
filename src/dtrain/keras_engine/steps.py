"""Computes one step on all replicas: forward, backward, all-reduce, update, metrics.

`StepProgram` is for several replicas; the program for one replica is in `local_steps.py`. How many steps a
call makes, and where their data comes from, is not decided here, but in `step_function.py`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from dtrain.keras_engine.accumulation import UPDATE
from dtrain.keras_engine.context import (
    ReplicaStep,
    TrialResults,
    current_step,
    gather_examples,
    variable_ids,
)
from dtrain.keras_engine.gradients import AllReduceStep, CompiledStep, LocalStep, MicroBatchStep, lookups_of
from dtrain.keras_engine.losses_and_metrics import (
    is_own_loss,
    metric_results,
    watch_metric,
    watch_own_call,
    whole_state,
)
from dtrain.keras_engine.probe import Findings, findings_of
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.reductions import NoWaits, Waits, as_floats
from dtrain.keras_engine.replica_calls import synchronise, watch
from dtrain.keras_engine.row_gradients import Lookups
from dtrain.keras_engine.rows import batch_rows, is_dense, row_count, without_optionals
from dtrain.keras_engine.trial import TriedStep
from dtrain.upstream import functions
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf


class Program(abc.ABC):
    """A model's train or test step, as a `StepFunction` calls it.

    Attributes:
        stock: whether the step is Keras' own; then `results` gives the logs of a call, and `run` gives none.
        compiled: whether XLA compiles the step.
    """

    stock: bool
    compiled: bool

    @property
    def traced(self) -> int:
        """The number of functions that the program has traced by itself."""
        return 0

    @property
    def findings(self) -> dict[str, Any] | None:
        """What the program has found out or decided, as plain data, for a resumed training; None before."""
        return None

    @findings.setter
    @abc.abstractmethod
    def findings(self, found: dict[str, Any]) -> None: ...

    def wants_part(self) -> bool:
        """Whether `try_step` needs a batch."""
        return False

    def try_step(self, part: Any) -> None:
        """Finds out what must be known before the step is traced.

        Args:
            part: a batch of this process' first replica; needed only if `wants_part` returns True.
        """
        del part

    def prepare(self, spec: Any, phase: str | None) -> None:  # noqa: B027
        """Makes what `run` of a phase needs, before it is traced; `spec` is the spec of a global batch."""

    @abc.abstractmethod
    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """Runs one step on all replicas.

        Args:
            parts: a batch for each replica of this process.
            sizes: the examples of each replica's part, over all processes; None if not known yet.
            phase: `ADD`, `UPDATE` or `PARTS` for a micro-batch; None if its gradients are all-reduced.

        Returns:
            The step's outputs for the global batch, or {} for a stock step; and the seconds that this worker
            waited for other workers, a scalar, or None if not measured.
        """

    @abc.abstractmethod
    def results(self) -> Any:
        """The metrics over all replicas and all steps since they were reset."""

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the planned steps run in XLA, many steps in one program.

        Args:
            steps: the number of planned steps; None if not known.
            batch: the examples in a batch; None if not known.
        """
        del steps, batch
        return False

    def run_group(self, part: Any) -> None:
        """Runs the steps of a part of a group of batches; called only if `in_xla` has returned True."""
        raise NotImplementedError

    def forget_restored(self) -> None:  # noqa: B027
        """Forgets restored findings, because the `fit` that they were restored for is over."""


class StepProgram(Program):
    """A model's train or test step, run on every replica.

    Args:
        model: a compiled Keras model under a strategy of dtrain's.
        layout: how the strategy's replicas are distributed.
        training: True for the train step, False for the test step.
        compiled: whether XLA compiles the forward and backward pass inside the replica.
        measured: whether to measure how long a step waits for other workers.
    """

    def __init__(
        self, model: Any, layout: ReplicaLayout, *, training: bool, compiled: bool, measured: bool = False
    ) -> None:
        self.model = model
        self.layout = layout
        self.training = training
        self.compiled = compiled
        self.measured = measured
        self.name = "train_step" if training else "test_step"
        # The results of Keras' own steps are computed once, after the last step of a call.
        self.stock = step_is_stock(model, self.name)
        self._results_while_traced = silent_results if self.stock else whole_results
        self._is_tried = False
        self._findings: Findings | None = None  # what trials have found out; None if none was needed

    def wants_part(self) -> bool:
        """Whether `try_step` needs a batch: for a user's own step, layers or losses, before step 1."""
        if self._is_tried:
            return False
        return self._own_step() or needs_trial(self.model) or any(map(is_own_loss, self._losses()))

    def _losses(self) -> list[Any]:
        return [loss for _, loss in upstream_keras.compiled_losses(self.model)]

    def _own_step(self) -> bool:
        return not (self.stock and is_keras_own(self.model, "compute_loss"))

    def try_step(self, part: Any) -> None:
        """Finds out whether a user's own losses are sums or means; Keras' own losses are known.

        All workers must call it.

        Args:
            part: a batch of this process' first replica; needed only if `wants_part` returns True.

        Raises:
            StepError: the step cannot run on several replicas as on one device.
        """
        refusal = None
        if self.wants_part():
            part = without_optionals(part)
            step = TriedStep(part=part, model=self.model, layout=self.layout, training=self.training)
            own_step = self._tried if self._own_step() else None
            self._findings, refusal = findings_of(step, own_step=own_step, try_layers=needs_trial(self.model))
        if refusal is not None:
            raise refusal
        self._is_tried = True
        for loss in self._losses():
            watch_own_call(loss)

    @property
    def findings(self) -> dict[str, Any] | None:
        """The findings, as plain data; None before. A trial with other weights may find something else."""
        return (self._findings or Findings()).as_data() if self._is_tried else None

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._is_tried = True
        self._findings = Findings.of_data(found)

    def _tried(self, part: Any, step: ReplicaStep) -> None:
        """Runs the user's step on one replica, including every point where replicas are combined."""
        self._watch_metrics()
        with self._results_while_traced(self.model):
            outputs = self._user_step(part)
        if not self.stock:
            combine(step, outputs)

    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`."""
        self._watch_metrics()
        strategy = self.model.distribute_strategy
        totals = None
        if sizes is not None:
            totals = upstream_tf.per_replica([tf.reduce_sum(sizes)] * len(parts))
        # Replaced here, not in the replicas, because their threads take turns and share the model's methods.
        with self._results_while_traced(self.model):
            in_replica = upstream_keras.with_seed_generator(
                lambda part, total: self._in_replica(part, total, phase)
            )
            outputs = strategy.run(in_replica, args=(upstream_tf.per_replica(list(parts)), totals))
        outputs, waited = outputs
        if waited is not None:
            # This worker's last replica to contribute waits only for other workers, not for its own replicas.
            waited = tf.reduce_min(tf.stack(strategy.experimental_local_results(waited)))
        return first_replica(strategy, outputs), waited

    def _watch_metrics(self) -> None:
        """Wraps the model's metrics, also those that were made before the engine was installed."""
        for metric in self.model.metrics:
            watch_metric(metric)

    def results(self) -> Any:
        """The metrics over all replicas and all steps since they were reset."""
        strategy = self.model.distribute_strategy
        return first_replica(strategy, strategy.run(lambda: metric_results(self.model)))

    def _in_replica(self, part: Any, total: Any, phase: str | None) -> Any:
        watch(self.model)
        part = without_optionals(part)
        size = batch_rows(part)
        clocks = self.measured and not upstream_tf.deterministic_operations()
        waits = Waits() if clocks else NoWaits()
        if total is None:
            total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, size)
            waits.expect(total)
        known = {"size": size, "total": total, "training": self.training}
        trial_results = TrialResults() if self._findings is None else self._findings.trial_results(self.model)
        step = self._step_of_phase(phase, **known, trial_results=trial_results, waits=waits)
        one = self._compiled_step if self.compiled else self._plain_step
        with current_step.set(step):
            outputs = one(step, part, known)
        return outputs, waits.total()

    def _step_of_phase(self, phase: str | None, **known: Any) -> AllReduceStep | MicroBatchStep:
        if phase is not None:
            return MicroBatchStep(self.layout, last=phase == UPDATE, **known)
        if self.layout.average_every:
            return LocalStep(self.layout, optimizer=self.model.optimizer, **known)
        return AllReduceStep(self.layout, **known)

    def _user_step(self, part: Any) -> Any:
        return unwrapped(getattr(self.model, self.name))(part)

    def _plain_step(self, step: AllReduceStep | MicroBatchStep, part: Any, known: dict[str, Any]) -> Any:
        del known
        outputs = self._user_step(part)
        synchronise(step)
        return {} if self.stock else combine(step, outputs)

    def _compiled_step(self, step: AllReduceStep | MicroBatchStep, part: Any, known: dict[str, Any]) -> Any:
        """Runs forward and backward in one XLA program, and the all-reduce and the update after it."""
        captured: list[tuple[Any, list[Any], list[Any]]] = []
        lookups: list[list[Lookups | None]] = []

        def inside(part: Any, size: Any, total: Any) -> Any:
            compiled = CompiledStep(
                self.layout, size=size, total=total, training=self.training, trial_results=step.trial_results
            )
            with current_step.set(compiled):
                self._user_step(part)
            captured[:] = compiled.captured
            step.assigned.update(compiled.assigned)
            present = [[g for g in grads if g is not None] for _, grads, _ in captured]
            lookups[:] = [[lookups_of(g) for g in grads] for grads in present]
            return present, [[each and each.sizes for each in found] for found in lookups]

        step.waits.arrived(known["size"])  # the XLA program cannot begin before the total is known
        program = upstream_tf.made_for_each_model(inside, jit_compile=True)
        gradients, sizes = program(part, known["size"], known["total"])
        applied = zip(captured, gradients, lookups, sizes, strict=True)
        for (optimizer, traced, variables), values, inside_of, counts in applied:
            present = [v for g, v in zip(traced, variables, strict=True) if g is not None]
            outside = [each and replace(each, sizes=n) for each, n in zip(inside_of, counts, strict=True)]
            found = iter(step.gradients_of_program(values, present, outside))
            step.reduced |= variable_ids(variables)
            optimizer.apply([None if g is None else next(found) for g in traced], variables)
        synchronise(step)
        return {}


def step_is_stock(model: Any, name: str) -> bool:
    """Whether a model's step, and the methods that compute its results, are Keras' own."""
    names = (name, "compute_metrics", "get_metrics_result")
    return all(is_keras_own(model, each) for each in names)


def is_keras_own(model: Any, name: str) -> bool:
    """Whether a model's method of this name is Keras' own, neither overridden nor set on the instance."""
    if name in vars(model):
        return False
    return getattr(type(model), name) is getattr(upstream_keras.trainer_class(), name)


def needs_trial(model: Any) -> bool:
    """Whether layers of a model are the user's own, add sums over the batch, or work along its examples."""
    layers = upstream_keras.layers_of(model)
    between = [each for layer in layers for each in getattr(layer, "operations", ())]
    return any(map(upstream_keras.adds_activity_sum, layers)) or any(map(_is_tried, (*layers, *between)))


def _is_tried(layer: Any) -> bool:
    if not upstream_keras.is_keras_own(layer) or isinstance(layer, keras.layers.Lambda):
        return True
    if hasattr(layer, "axes"):  # a transposition, by default of all dimensions
        return keras.tree.flatten(layer.axes)[0] != 0
    axes = keras.tree.flatten(getattr(layer, "axis", 1))
    return 0 in axes or None in axes


def combine(step: ReplicaStep, outputs: Any) -> Any:
    """Combines a step's outputs over the replicas: numbers by shares, rows in the order of the examples."""

    def one(path: Any, value: Any) -> Any:
        name = "/".join(map(str, path)) or "its value"
        if not is_dense(value):
            return _all_rows(step, value, name)
        value = tf.convert_to_tensor(value)
        name = f"what {'train_step' if step.training else 'test_step'} returns as {name!r}"
        if value.dtype.is_floating or value.dtype.is_integer or (value.dtype.is_bool and value.shape.rank):
            return as_floats(lambda number: step.whole_value(number, name), value)
        return value

    paths = keras.tree.flatten_with_path(outputs)
    return keras.tree.pack_sequence_as(outputs, [one(path, value) for path, value in paths])


def _all_rows(step: ReplicaStep, value: Any, name: str) -> Any:
    """All replicas' rows of a ragged or sparse value, which must have a row for each example."""
    rows = row_count(value, tf.int32)
    message = (
        f"{name!r} is a {type(value).__name__} whose rows are not the examples': they cannot be put together"
    )
    with tf.control_dependencies([tf.debugging.assert_equal(rows, step.size, message=message)]):
        return gather_examples(tf.identity(value))


@contextlib.contextmanager
def silent_results(model: Any) -> Iterator[None]:
    """A context in which Keras' own step returns no results; they are computed once, after the all-reduce."""
    object.__setattr__(model, "get_metrics_result", dict)
    try:
        yield
    finally:
        object.__delattr__(model, "get_metrics_result")


@contextlib.contextmanager
def whole_results(model: Any) -> Iterator[None]:
    """Within it, `metric.result()` gives the value over all replicas; for tracing a user's own step."""
    wrapped = []
    for metric in _all_metrics(model):
        object.__setattr__(metric, "result", _whole_result(metric, metric.result))
        wrapped.append(metric)
    try:
        yield
    finally:
        for metric in wrapped:
            object.__delattr__(metric, "result")


def _whole_result(metric: Any, result: Callable[[], Any]) -> Callable[[], Any]:
    def whole() -> Any:
        variables = list(metric.variables)
        with keras.StatelessScope(state_mapping=list(zip(variables, whole_state(variables), strict=True))):
            found = result()
        step = current_step()
        if step is not None:
            step.mark_whole(found)
        return found

    return whole


def _all_metrics(model: Any) -> list[Any]:
    return list({id(m): m for m in model.metrics if "result" not in vars(m)}.values())


def unwrapped(function: Any) -> Callable[..., Any]:
    """The Python code of a `tf.function`, even of one for XLA: replicas cannot communicate inside one."""
    if not callable(getattr(function, "python_function", None)):
        return function
    return lambda *args: functions.call_inline(function, type(function).__call__, args, {})


def first_replica(strategy: Any, value: Any) -> Any:
    """The values of this process' first replica, of a nest of per-replica values."""
    return tf.nest.map_structure(
        lambda v: strategy.experimental_local_results(v)[0], value, expand_composites=False
    )
