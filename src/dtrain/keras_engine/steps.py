"""Computes one step on all replicas: forward, backward, reduction, update, metrics.

Reads top to bottom in the order in which a step happens. How many steps a call makes, and where their
data comes from, is `functions.py`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.errors import StepError
from dtrain.keras_engine import metrics, own_metrics, state
from dtrain.keras_engine.accumulation import check_dense
from dtrain.keras_engine.context import ReplicaStep, gather_examples, replica_step, variable_ids
from dtrain.keras_engine.input import batch_rows, map_leaves
from dtrain.keras_engine.losses import is_own_loss, watch_own_call
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
from dtrain.keras_engine.row_gradients import Lookups, sum_gradients
from dtrain.keras_engine.talk import exchange
from dtrain.keras_engine.waits import Waits
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf


class StepProgram:
    """A model's train or test step, made to run on every replica.

    Args:
        model: a compiled Keras model under a strategy of dtrain's.
        layout: how the strategy's replicas are spread.
        training: the train step, or the test step.
        compiled: whether forward and backward are compiled by XLA inside the replica.
        measured: whether to find out how long a step waits for the other workers.
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
        self.kinds: list[LossKind] = []
        self.summed_losses: frozenset[int] = frozenset()
        self.coupled: frozenset[int] = frozenset()
        self._learnt = False
        self._coupled: list[bool] = []
        self._named = False  # whether `coupled` says what `_coupled` does

    def wants_part(self) -> bool:
        """Whether `learn` needs a batch to learn from."""
        if self._learnt:
            return False
        losses = [loss for _, loss in upstream_keras.compiled_losses(self.model)]
        return self._own_step() or has_own_layers(self.model) or any(map(is_own_loss, losses))

    def _own_step(self) -> bool:
        return not (self.stock and _is_keras_own(self.model, "compute_loss"))

    def learn(self, part: Any) -> None:
        """Finds out what a user's own losses are, sums or means; there is nothing to learn of Keras'.

        Args:
            part: a batch of this process' first replica; needed where `wants_part` says so.
        """
        if not self.wants_part():
            if self._learnt:
                self._name_coupled()
            self._learnt = True
            return
        self._learnt = True
        part = without_optionals(part)
        rows = min(ROWS, int(batch_rows(part)))
        # All workers trace the step, which makes what it makes; nothing talks, so one of them can try it.
        trial = self._traced(part, rows) if self._own_step() and rows > 0 else None
        # One worker decides for all: no worker's own examples may make it differ from the others.
        mine = self._found(part, rows, trial) if self.layout.worker == 0 else None
        self._coupled, self.summed_losses, self.kinds, refusal = exchange(self.layout, mine)[0]
        if refusal:
            raise StepError(refusal["message"], hint=refusal["hint"])
        self._named = False
        self._name_coupled()

    def _traced(self, part: Any, rows: int) -> StepTrial | None:
        try:
            return StepTrial(self._tried, part, self.model, self.layout, rows=rows, training=self.training)
        except Exception as error:
            logger.debug("the step cannot be tried out: %s", error, exc_info=True)
            return None

    def _found(self, part: Any, rows: int, trial: StepTrial | None) -> Any:
        """What there is to learn: the coupled losses, the summed ones, the kinds, and why not to train."""
        model, layout = self.model, self.layout
        built = all(layer.built for layer in upstream_keras.layers_of(model))
        if rows > 0 and built and has_own_layers(model):
            self.summed_losses = summed_losses(model, part, layout, rows)
        coupled = coupled_losses(model, part, layout, rows if built else 0)
        if trial is not None and (self.summed_losses or any(coupled)):
            self._coupled, self._named = coupled, False
            self._name_coupled()
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
        return coupled, self.summed_losses, kinds, refusal

    def _name_coupled(self) -> None:
        if not self._named:
            losses = [loss for _, loss in upstream_keras.compiled_losses(self.model)]
            for loss in losses:
                watch_own_call(loss)
            pairs = zip(losses, self._coupled, strict=False)
            self.coupled = frozenset(id(loss) for loss, found in pairs if found)
            self._named = True

    @property
    def findings(self) -> dict[str, Any] | None:
        """What was learnt, as plain data; None before. A trial with other weights may find something else."""
        if not self._learnt:
            return None
        kinds = [(kind.sums, kind.scale, kind.rows) for kind in self.kinds]
        return {"coupled": list(self._coupled), "summed": sorted(self.summed_losses), "kinds": kinds}

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        self._learnt = True
        self._coupled = list(found["coupled"])
        self.summed_losses = frozenset(found["summed"])
        self.kinds = [
            LossKind(sums=sums, scale=scale, rows=bool(rows and rows[0]))
            for sums, scale, *rows in found["kinds"]
        ]
        self._named = False  # the losses may not be built yet

    def _tried(self, part: Any, step: ReplicaStep) -> None:
        """The user's step, all of its combining points included, on one replica alone."""
        self._watch_metrics()
        step.summed_losses = self.summed_losses
        step.coupled_losses = self.coupled
        with silent_results(self.model) if self.stock else metrics.whole_results(self.model):
            outputs = self._user_step(part)
        if not self.stock:
            combine(step, outputs)

    def run(self, parts: Sequence[Any], total: Any, phase: str | None = None) -> tuple[Any, Any]:
        """One step; what it returns is the whole batch's, or {} where `results` will tell.

        Beside it, the seconds that this worker waited for the others, a scalar; None if not measured.

        Args:
            parts: a batch for each replica of this process.
            total: examples in the whole batch, over all processes; None if not known yet.
            phase: as `ReplicaStep.phase`.
        """
        self._watch_metrics()
        strategy = self.model.distribute_strategy
        totals = upstream_tf.per_replica([total] * len(parts)) if total is not None else None
        # Set here, not in the replicas: they run in threads that take turns.
        with silent_results(self.model) if self.stock else metrics.whole_results(self.model):
            in_replica = upstream_keras.with_seed_generator(
                lambda part, total: self._in_replica(part, total, phase)
            )
            outputs = strategy.run(in_replica, args=(upstream_tf.per_replica(list(parts)), totals))
        outputs, waited = outputs
        if waited is not None:
            # The last replica of this worker to give its part is the one that waits for other workers only.
            waited = tf.reduce_min(tf.stack(strategy.experimental_local_results(waited)))
        return first_replica(strategy, outputs), waited

    def _watch_metrics(self) -> None:
        """Those that were made before the engine was there."""
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
        waits = Waits() if self.measured else None
        if total is None:
            total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, size)
            if waits is not None:
                waits.expect(total)
        if self.compiled:
            outputs = self._compiled_step(part, size, total, phase, waits)
        else:
            step = self._knowing(
                ReplicaStep(
                    self.layout, size=size, total=total, training=self.training, phase=phase, waits=waits
                )
            )
            with replica_step(step):
                outputs = self._user_step(part)
                state.synchronise(step)
                outputs = {} if self.stock else combine(step, outputs)
        return outputs, None if waits is None else waits.total()

    def _knowing(self, step: ReplicaStep) -> ReplicaStep:
        """Gives a step what was learnt of the user's losses."""
        step.summed_losses = self.summed_losses
        step.coupled_losses = self.coupled
        if self.kinds:
            step.weights = [kind.weight(step.share) for kind in self.kinds]
            step.rows_at = frozenset(i for i, kind in enumerate(self.kinds) if kind.rows)
        return step

    def _user_step(self, part: Any) -> Any:
        return unwrapped(getattr(self.model, self.name))(part)

    def _compiled_step(self, part: Any, size: Any, total: Any, phase: str | None, waits: Waits | None) -> Any:
        """Forward and backward in one XLA program; the reduction and the update after it."""
        captured: list[tuple[Any, list[Any], list[Any]]] = []
        kinds: list[list[tuple[str, ...]]] = []
        written: dict[int, Any] = {}

        def inside(part: Any, size: Any, total: Any) -> Any:
            step = self._knowing(
                ReplicaStep(self.layout, size=size, total=total, training=self.training, compiled=True)
            )
            with replica_step(step):
                self._user_step(part)
            captured[:] = step.captured
            written.update(step.assigned)
            present = [[g for g in grads if g is not None] for _, grads, _ in step.captured]
            lookups = [[Lookups.of(g) for g in grads] for grads in present]
            kinds[:] = [[each.kinds for each in found] for found in lookups]
            return present, [[each.sizes for each in found] for found in lookups]

        if waits is not None:
            waits.meet(size)  # the program as a whole needs the total
        gradients, sizes = tf.function(inside, jit_compile=True, autograph=False)(part, size, total)
        step = ReplicaStep(
            self.layout, size=size, total=total, training=self.training, phase=phase, waits=waits
        )
        step.assigned.update(written)
        with replica_step(step):
            for (optimizer, traced, variables), values, *rows in zip(
                captured, gradients, kinds, sizes, strict=True
            ):
                if phase is not None:
                    check_dense(values)
                lookups = list(map(Lookups, *rows))
                found = iter(values if phase is not None else sum_gradients(values, lookups))
                step.reduced |= variable_ids(variables)
                optimizer.apply([None if g is None else next(found) for g in traced], variables)
            state.synchronise(step)
        return {}


def step_is_stock(model: Any, name: str) -> bool:
    """Whether a model's step, and all that computes its results, is Keras' own."""
    names = (name, "compute_metrics", "get_metrics_result")
    return all(_is_keras_own(model, each) for each in names)


def _is_keras_own(model: Any, name: str) -> bool:
    """Whether a model has Keras' own method of a name, neither overridden nor set on the instance."""
    if name in vars(model):
        return False
    return getattr(type(model), name) is getattr(upstream_keras.trainer_class(), name)


def combine(step: ReplicaStep, outputs: Any) -> Any:
    """What a user's step returned, for the whole batch: numbers by shares, rows in the examples' order."""

    def one(path: Any, value: Any) -> Any:
        name = "/".join(map(str, path)) or "its value"
        if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
            return _all_rows(step, value, name)
        value = tf.convert_to_tensor(value)
        name = f"what {'train_step' if step.training else 'test_step'} returns as {name!r}"
        if value.dtype.is_floating:
            return step.whole_value(value, name)
        if value.dtype.is_integer or (value.dtype.is_bool and value.shape.rank):
            whole = step.whole_value(tf.cast(value, tf.float64), name)
            return tf.cast(tf.round(whole), value.dtype)
        return value

    paths = keras.tree.flatten_with_path(outputs)
    return keras.tree.pack_sequence_as(outputs, [one(path, value) for path, value in paths])


def _all_rows(step: ReplicaStep, value: Any, name: str) -> Any:
    """A ragged or sparse value of a step, of all replicas; such a value has a row for each example."""
    rows = tf.cast(value.nrows() if isinstance(value, tf.RaggedTensor) else value.dense_shape[0], tf.int32)
    told = (
        f"{name!r} is a {type(value).__name__} whose rows are not the examples': they cannot be put together"
    )
    with tf.control_dependencies([tf.debugging.assert_equal(rows, step.size, message=told)]):
        return gather_examples(tf.identity(value))


@contextlib.contextmanager
def silent_results(model: Any) -> Iterator[None]:
    """While Keras' own step is traced, it returns no results: they are computed after the reduction."""
    object.__setattr__(model, "get_metrics_result", dict)
    try:
        yield
    finally:
        object.__delattr__(model, "get_metrics_result")


def unwrapped(function: Any) -> Callable[..., Any]:
    """What a `tf.function` does, also one that XLA is to compile: replicas cannot meet inside one."""
    if not callable(getattr(function, "python_function", None)):
        return function
    return lambda *args: upstream_tf.call_inline(function, type(function).__call__, args, {})


def first_replica(strategy: Any, value: Any) -> Any:
    """What the first replica of this process holds of a nest of values."""
    return tf.nest.map_structure(
        lambda v: strategy.experimental_local_results(v)[0], value, expand_composites=False
    )


def without_optionals(part: Any) -> Any:
    """A generator's None arrives as an empty Optional; a step wants None."""
    return map_leaves(lambda x: None if isinstance(x, tf.experimental.Optional) else x, part)
