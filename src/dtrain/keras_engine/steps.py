"""Computes one step on all replicas: forward, backward, all-reduce, update, metrics.

`StepProgram` is for several replicas; the program for one replica is in `local_steps.py`. How many steps a
call makes, and where their data comes from, is not decided here, but in `step_function.py`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import StepError
from dtrain.keras_engine import metrics, own_metrics, state
from dtrain.keras_engine.accumulation import UPDATE, MicroBatch
from dtrain.keras_engine.context import (
    Learnt,
    ReplicaStep,
    as_floats,
    current_step,
    gather_examples,
    variable_ids,
)
from dtrain.keras_engine.gradients import AtOnce, zero_if_empty
from dtrain.keras_engine.input import batch_rows, map_leaves
from dtrain.keras_engine.losses import is_own_loss, watch_own_call
from dtrain.keras_engine.peer_exchange import exchange
from dtrain.keras_engine.probe import (
    ROWS,
    LossKind,
    StepTrial,
    coupled_losses,
    has_own_layers,
    summed_losses,
)
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.replica_attributes import watch
from dtrain.keras_engine.row_gradients import Lookups
from dtrain.keras_engine.waits import NoWaits, Waits
from dtrain.log import logger
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
        """Whether `learn` needs a batch."""
        return False

    def learn(self, part: Any) -> None:
        """Finds out what must be known before the step is traced.

        Args:
            part: a batch of this process' first replica; needed only if `wants_part` returns True.
        """
        del part

    @abc.abstractmethod
    def run(self, parts: Sequence[Any], total: Any, phase: str | None = None) -> tuple[Any, Any]:
        """Runs one step on all replicas.

        Args:
            parts: a batch for each replica of this process.
            total: the examples in the global batch, over all processes; None if not known yet.
            phase: `ADD` or `UPDATE` for a micro-batch; None if gradients are all-reduced in this step.

        Returns:
            The step's outputs for the global batch, or {} for a stock step; and the seconds that this worker
            waited for other workers, a scalar, or None if not measured.
        """

    @abc.abstractmethod
    def results(self) -> Any:
        """The metrics over all replicas and all steps since they were reset."""

    def in_xla(self, steps: int | None, batch: int | None) -> bool:
        """Whether the steps of a `fit` run in XLA, many steps in one program.

        Args:
            steps: the number of planned steps; None if not known.
            batch: the examples in a batch; None if not known.
        """
        del steps, batch
        return False

    def run_group(self, part: Any) -> None:
        """Runs the steps of a part of a group of batches; called only if `in_xla` has returned True."""
        raise NotImplementedError

    def forget_restored(self) -> None:
        """Forgets restored findings, because the `fit` that they were restored for is over."""
        del self


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
        self._results_while_traced = silent_results if self.stock else metrics.whole_results
        self._has_learnt = False
        self._kinds: list[LossKind] = []
        self._summed: frozenset[int] = frozenset()
        self._coupled: list[bool] = []

    def wants_part(self) -> bool:
        """Whether `learn` needs a batch: for a user's own step, layers or losses, before the first step."""
        if self._has_learnt:
            return False
        return self._own_step() or has_own_layers(self.model) or any(map(is_own_loss, self._losses()))

    def _losses(self) -> list[Any]:
        return [loss for _, loss in upstream_keras.compiled_losses(self.model)]

    def _own_step(self) -> bool:
        return not (self.stock and _is_keras_own(self.model, "compute_loss"))

    def learn(self, part: Any) -> None:
        """Finds out whether a user's own losses are sums or means; Keras' own losses are known.

        All workers must call it.

        Args:
            part: a batch of this process' first replica; needed only if `wants_part` returns True.

        Raises:
            StepError: the step cannot run on several replicas as on one device.
        """
        if self.wants_part():
            part = without_optionals(part)
            rows = min(ROWS, int(batch_rows(part)))
            # All workers trace the step, because tracing creates variables. A trial does not communicate, so
            # only the first worker runs it.
            trial = self._traced(part, rows) if self._own_step() and rows > 0 else None
            # The first worker decides for all, because trials with different examples might differ.
            mine = self._found(part, rows, trial) if self.layout.worker == 0 else None
            self._coupled, self._summed, self._kinds, refusal = exchange(self.layout, mine)[0]
            if refusal:
                self._has_learnt = True
                raise StepError(refusal["message"], hint=refusal["hint"])
        self._has_learnt = True
        self._watch_losses()

    def _traced(self, part: Any, rows: int) -> StepTrial | None:
        try:
            return StepTrial(
                self._tried, part, self.model, self.layout, self._learnt(), rows=rows, training=self.training
            )
        except Exception as error:
            logger.debug("the step cannot be tried out: %s", error, exc_info=True)
            return None

    def _found(self, part: Any, rows: int, trial: StepTrial | None) -> Any:
        """The trials' findings: coupled losses, summed losses, kinds, and the error that refuses the step."""
        model, layout = self.model, self.layout
        built = all(layer.built for layer in upstream_keras.layers_of(model))
        if rows > 0 and built and has_own_layers(model):
            self._summed = summed_losses(model, part, layout, rows)
        self._coupled = coupled_losses(model, part, layout, rows if built else 0)
        if trial is not None and (self._summed or any(self._coupled)):
            self._watch_losses()
            trial = self._traced(part, rows)
        kinds: list[LossKind] = []
        refusal: dict[str, str] = {}
        try:
            if trial is not None:
                trial.check_state()
                kinds = trial.kinds()
        except StepError as error:
            refusal = {"message": error.message, "hint": error.hint}
        except Exception as error:
            logger.debug("the step cannot be tried out: %s", error, exc_info=True)
        return self._coupled, self._summed, kinds, refusal

    def _watch_losses(self) -> None:
        for loss in self._losses():
            watch_own_call(loss)

    def _learnt(self) -> Learnt:
        """The findings, for the loss objects that the model has now."""
        pairs = zip(self._losses(), self._coupled, strict=False)
        return Learnt(self._kinds, self._summed, frozenset(id(loss) for loss, coupled in pairs if coupled))

    @property
    def findings(self) -> dict[str, Any] | None:
        """The findings, as plain data; None before. A trial with other weights may find something else."""
        if not self._has_learnt:
            return None
        kinds = [(kind.sums, kind.scale, kind.rows) for kind in self._kinds]
        return {"coupled": list(self._coupled), "summed": sorted(self._summed), "kinds": kinds}

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._has_learnt = True
        self._coupled = list(found["coupled"])
        self._summed = frozenset(found["summed"])
        self._kinds = [
            LossKind(sums=sums, scale=scale, rows=bool(rows and rows[0]))
            for sums, scale, *rows in found["kinds"]
        ]

    def _tried(self, part: Any, step: ReplicaStep) -> None:
        """Runs the user's step on one replica, including every point where replicas are combined."""
        self._watch_metrics()
        with self._results_while_traced(self.model):
            outputs = self._user_step(part)
        if not self.stock:
            combine(step, outputs)

    def run(self, parts: Sequence[Any], total: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`."""
        self._watch_metrics()
        strategy = self.model.distribute_strategy
        totals = upstream_tf.per_replica([total] * len(parts)) if total is not None else None
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
            own_metrics.watch(metric)

    def results(self) -> Any:
        """The metrics over all replicas and all steps since they were reset."""
        strategy = self.model.distribute_strategy
        return first_replica(strategy, strategy.run(lambda: metrics.results(self.model)))

    def _in_replica(self, part: Any, total: Any, phase: str | None) -> Any:
        watch(self.model)
        part = without_optionals(part)
        size = batch_rows(part)
        waits = Waits() if self.measured else NoWaits()
        if total is None:
            total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, size)
            waits.expect(total)
        known = {"size": size, "total": total, "training": self.training}
        step = _step_of_phase(self.layout, phase, **known, learnt=self._learnt(), waits=waits)
        one = self._compiled_step if self.compiled else self._plain_step
        with current_step.set(step):
            outputs = one(step, part, known)
        return outputs, waits.total()

    def _user_step(self, part: Any) -> Any:
        return unwrapped(getattr(self.model, self.name))(part)

    def _plain_step(self, step: AtOnce | MicroBatch, part: Any, known: dict[str, Any]) -> Any:
        del known
        outputs = self._user_step(part)
        state.synchronise(step)
        return {} if self.stock else combine(step, outputs)

    def _compiled_step(self, step: AtOnce | MicroBatch, part: Any, known: dict[str, Any]) -> Any:
        """Runs forward and backward in one XLA program, and the all-reduce and the update after it."""
        captured: list[tuple[Any, list[Any], list[Any]]] = []
        kinds: list[list[tuple[str, ...]]] = []

        def inside(part: Any, size: Any, total: Any) -> Any:
            compiled = CompiledStep(
                self.layout, size=size, total=total, training=self.training, learnt=step.learnt
            )
            with current_step.set(compiled):
                self._user_step(part)
            captured[:] = compiled.captured
            step.assigned.update(compiled.assigned)
            present = [[g for g in grads if g is not None] for _, grads, _ in captured]
            lookups = [[Lookups.of(g) for g in grads] for grads in present]
            kinds[:] = [[each.kinds for each in found] for found in lookups]
            return present, [[each.sizes for each in found] for found in lookups]

        step.waits.meet(known["size"])  # the XLA program cannot begin before the total is known
        program = tf.function(inside, jit_compile=True, autograph=False)
        gradients, sizes = program(part, known["size"], known["total"])
        for (optimizer, traced, variables), values, *rows in zip(
            captured, gradients, kinds, sizes, strict=True
        ):
            present = [v for g, v in zip(traced, variables, strict=True) if g is not None]
            found = iter(step.gradients_of_program(values, present, list(map(Lookups, *rows))))
            step.reduced |= variable_ids(variables)
            optimizer.apply([None if g is None else next(found) for g in traced], variables)
        state.synchronise(step)
        return {}


class CompiledStep(ReplicaStep):
    """A step inside a program that XLA compiles; its local gradients are all-reduced and applied outside.

    Attributes:
        captured: the optimizers, each with the gradients and variables of its `apply`.
    """

    def __init__(self, layout: ReplicaLayout, **known: Any) -> None:
        super().__init__(layout, **known)
        self.captured: list[tuple[Any, list[Any], list[Any]]] = []

    def whole_gradients(self, gradients: list[Any], variables: list[Any], target: Any) -> list[Any]:
        """This replica's own gradients, weighted by its share, not all-reduced."""
        return zero_if_empty(self, gradients)

    def gradients_to_apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Captures the gradients; nothing is applied inside the XLA program."""
        self.captured.append((optimizer, gradients, variables))


def _step_of_phase(layout: ReplicaLayout, phase: str | None, **known: Any) -> AtOnce | MicroBatch:
    return AtOnce(layout, **known) if phase is None else MicroBatch(layout, last=phase == UPDATE, **known)


def step_is_stock(model: Any, name: str) -> bool:
    """Whether a model's step, and the methods that compute its results, are Keras' own."""
    names = (name, "compute_metrics", "get_metrics_result")
    return all(_is_keras_own(model, each) for each in names)


def _is_keras_own(model: Any, name: str) -> bool:
    """Whether a model's method of this name is Keras' own, neither overridden nor set on the instance."""
    if name in vars(model):
        return False
    return getattr(type(model), name) is getattr(upstream_keras.trainer_class(), name)


def combine(step: ReplicaStep, outputs: Any) -> Any:
    """Combines a step's outputs over the replicas: numbers by shares, rows in the order of the examples."""

    def one(path: Any, value: Any) -> Any:
        name = "/".join(map(str, path)) or "its value"
        if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
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
    rows = tf.cast(value.nrows() if isinstance(value, tf.RaggedTensor) else value.dense_shape[0], tf.int32)
    told = (
        f"{name!r} is a {type(value).__name__} whose rows are not the examples': they cannot be put together"
    )
    with tf.control_dependencies([tf.debugging.assert_equal(rows, step.size, message=told)]):
        return gather_examples(tf.identity(value))


@contextlib.contextmanager
def silent_results(model: Any) -> Iterator[None]:
    """A context in which Keras' own step returns no results; they are computed once, after the all-reduce."""
    object.__setattr__(model, "get_metrics_result", dict)
    try:
        yield
    finally:
        object.__delattr__(model, "get_metrics_result")


def unwrapped(function: Any) -> Callable[..., Any]:
    """The Python code of a `tf.function`, even of one for XLA: replicas cannot communicate inside one."""
    if not callable(getattr(function, "python_function", None)):
        return function
    return lambda *args: upstream_tf.call_inline(function, type(function).__call__, args, {})


def first_replica(strategy: Any, value: Any) -> Any:
    """The values of this process' first replica, of a nest of per-replica values."""
    return tf.nest.map_structure(
        lambda v: strategy.experimental_local_results(v)[0], value, expand_composites=False
    )


def without_optionals(part: Any) -> Any:
    """A batch with None for every Optional; Keras passes a generator's None as an empty Optional."""
    return map_leaves(lambda x: None if isinstance(x, tf.experimental.Optional) else x, part)
