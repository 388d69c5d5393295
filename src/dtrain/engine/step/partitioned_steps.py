"""Computes one step on all replicas by one program: the step of one device, traced once and partitioned.

It implements `steps.Program`. How a traced function is divided is decided in `partition/`, which knows
nothing of Keras; how many steps a call makes, in `call_size.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.batch_rows import (
    BatchParts,
    is_dense,
    like,
    without_optional_specs,
    without_optionals,
)
from dtrain.engine.replica.gradient_marks import GradientMarks
from dtrain.engine.replica.single_program import as_single_program, making_variables
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.step.replica_communication import StrategyCollectives
from dtrain.engine.step.steps import Program, run_step, step_is_stock
from dtrain.engine.synchronisation.accumulation import PARTS
from dtrain.engine.synchronisation.steps_without_hook import WHOLE
from dtrain.interfaces.divided_weights import divided_dim
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.partition.layouts import REPLICATED, Layout, Sharded
from dtrain.partition.partition import Partitioned, by_batch, by_weight
from dtrain.partition.plan import Plan
from dtrain.partition.replicas import Replicas
from dtrain.upstream import keras_optimizers, tf_replicas, tf_tracing, tf_variables


class DividedFunction:
    """A function of a batch, traced as one device runs it, which the replicas compute together.

    Args:
        function: the function.
        spec: the spec of the whole batch, without Optionals. A batch whose number of rows it gives must be
            divided evenly (`batch_rows.bounds`).
        strategy: the strategy of the variables that the function uses.
        layout: how the strategy's replicas are distributed.
        in_parts: variables of which each replica holds a part for now, beside those that are made so.
        compiled: whether XLA compiles it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: Any,
        strategy: Any,
        layout: ReplicaLayout,
        *,
        in_parts: Sequence[Any] = (),
        compiled: bool = False,
    ) -> None:
        self._compiled = compiled
        self._replicas, self._first = layout.replicas, layout.first_replica
        leaves = leaves_there(spec)
        rows = next((leaf.shape[0] for leaf in leaves if leaf.shape.rank), None)
        self._may_be_idle = rows is None or rows < layout.replicas
        # Constants, so that what follows from them is computed once, not in each step.
        every = BatchParts(layout.replicas, 0, layout.replicas)
        self._sizes = None if rows is None else [end - start for start, end in every.bounds(rows)]
        marks = GradientMarks()
        self._communication = StrategyCollectives(strategy, layout, marks)
        with thread_state.having(gradient_marks=marks if layout.gradient_hook is not None else None):
            self._function = traced_as_one_device(function, spec, strategy, compiled=compiled)
        variables = _distributed(self._function)
        copies = copies_of(self._function)
        parts = {id(tf_variables.underlying(variable)) for variable in in_parts}

        def held_in_parts(captured: Any) -> bool:
            variable = variables.get(id(captured))
            return variable is not None and (id(variable) in parts or is_in_parts(variable))

        def division(captured: Any) -> Sharded | None:
            variable = variables.get(id(captured))
            dim = divided_dim(variable)
            return None if variable is None or dim is None else by_weight(variable.shape, dim)

        self._divide = functools.partial(
            Partitioned,
            self._function,
            [layout for leaf in leaves for layout in _layouts(leaf)],
            Replicas(
                layout.local_replicas,
                layout.replicas,
                layout.first_replica,
                _devices(strategy),
                layout.shard_groups,
            ),
            copies=lambda captured: copies.get(id(captured)),
            in_parts=held_in_parts,
            held=division,
        )
        self._divided: dict[bool, Partitioned] = {}

    @property
    def plan(self) -> Plan:
        """What the replicas communicate."""
        return next(iter(self._divided.values())).plan if self._divided else self._partitioned(False).plan

    @property
    def differs_if_filled(self) -> bool:
        """Whether it is computed otherwise for batches of which every replica surely has rows."""
        return self._may_be_idle and not self._partitioned(True).some_idle

    def _partitioned(self, filled: bool) -> Partitioned:
        """The divided function, for batches of which every replica surely has rows, or for any."""
        some_idle = self._may_be_idle and not filled
        if some_idle not in self._divided:
            partitioned = self._divide(some_idle=some_idle)
            if filled and self._may_be_idle and partitioned.draws:
                # What it draws goes on where it has drawn before, whatever the data.
                partitioned = self._partitioned(False)
            self._divided[some_idle] = partitioned
        return self._divided[some_idle]

    def __call__(self, parts: Sequence[Any], sizes: tf.Tensor | None = None, *, filled: bool = False) -> Any:
        """Makes the operations that compute the function, in the graph that is being traced.

        Args:
            parts: a batch for each replica of this process.
            sizes: the rows of the parts of all replicas, an int32 vector; None gathers them.
            filled: whether every replica surely has rows.

        Returns:
            What the function returns for the whole batch.
        """
        self._communication.measure()
        partitioned = self._partitioned(filled)
        leaves = [leaves_there(part) for part in parts]
        if not leaves:
            sizes = tf.ones([self._replicas], tf.int32)
        elif self._sizes is not None:
            sizes = tf.constant(self._sizes, tf.int32)
        elif sizes is None:
            sizes = self._communication.sizes(leaves)
        if leaves and partitioned.some_idle:
            leaves = _with_rows(leaves, sizes, self._first)
        inputs: list[list[tf.Tensor]] = []
        for by_replica in zip(*leaves, strict=True):
            given = list(by_replica)
            if not is_dense(by_replica[0]):
                given = [self._communication.whole(by_replica, sizes, self._first)] * len(by_replica)
            components = [tf.nest.flatten(leaf, expand_composites=True) for leaf in given]
            inputs += map(list, zip(*components, strict=True))
        outputs = iter(partitioned(sizes, inputs, self._communication, compiled=self._compiled))
        return tf.nest.map_structure(
            lambda spec: spec if spec is None else _shaped(next(outputs), spec),
            self._function.structured_outputs,
            expand_composites=True,
        )

    def waited(self) -> tf.Tensor | None:
        """The seconds that the operations made last wait for other workers; None if not measured."""
        waits = self._communication.waits
        return None if waits is None else waits.total()


def traced_as_one_device(
    function: Callable[..., Any], spec: Any, strategy: Any, *, compiled: bool = False
) -> Any:
    """A function of a batch, as a `ConcreteFunction` of the batch's tensors, as one device runs it.

    Variables that the function makes are made under the strategy.

    Args:
        function: the function.
        spec: the spec of the whole batch, without Optionals.
        strategy: the strategy of the variables that the function uses.
        compiled: whether XLA is to compile it. Then the gradient of a loop computes sizes anew instead of
            keeping them in a list, because XLA has to know them.
    """
    leaves = leaves_there(spec)
    components = [component for leaf in leaves for component in tf.nest.flatten(leaf, expand_composites=True)]

    def traced(*tensors: Any) -> Any:
        given = iter(tf.nest.pack_sequence_as(leaves, tensors, expand_composites=True))
        filled = [leaf if leaf is None else next(given) for leaf in tf.nest.flatten(spec)]
        with as_single_program(), making_variables(strategy):
            # Later, a variable of which each replica holds a part would be read as the sum of all parts.
            return tf.nest.map_structure(_read, function(tf.nest.pack_sequence_as(spec, filled)))

    with making_variables(strategy):
        return tf_tracing.made_for_each_model(traced, jit_compile=compiled or None).get_concrete_function(
            *components
        )


def _read(output: Any) -> Any:
    """The value of a variable; any other result as it is."""
    return tf.convert_to_tensor(output) if isinstance(output, tf.Variable | keras.Variable) else output


def leaves_there(batch: Any) -> list[Any]:
    """The leaves of a batch, or of its spec, that are not None, in the order of `tf.nest`."""
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def _with_rows(parts: Sequence[Sequence[Any]], sizes: tf.Tensor, place: int) -> list[list[Any]]:
    """Gives each part without rows the first row of the first part here, or zeros if that has none.

    A batch without rows stays as it is. There is one condition, since the parts of most batches have rows.

    Args:
        parts: the leaves of each part.
        sizes: the rows of all replicas.
        place: the number of this process' first replica.
    """
    lacking = tf.cast(tf.equal(sizes[place : place + len(parts)], 0), tf.int32)
    open_parts = [
        (replica, leaf, first)
        for replica, part in enumerate(parts)
        for leaf, first in zip(part, parts[0], strict=True)
        if is_dense(leaf) and leaf.shape.rank and not leaf.shape[0]
    ]

    def with_row(replica: int, leaf: Any, first: Any) -> Any:
        zeros = tf.zeros(tf.concat([[1], tf.shape(first)[1:]], axis=0), first.dtype)
        return tf.concat([leaf, tf.concat([first[:1], zeros], axis=0)[: lacking[replica]]], axis=0)

    filled = tf.cond(
        tf.logical_and(tf.reduce_any(lacking > 0), tf.reduce_sum(sizes) > 0),
        lambda: [with_row(*open_part) for open_part in open_parts],
        lambda: [tf.identity(leaf) for _, leaf, _ in open_parts],
    )
    made = {id(leaf): like(leaf, new_leaf) for (_, leaf, _), new_leaf in zip(open_parts, filled, strict=True)}
    return [[made.get(id(leaf), leaf) for leaf in part] for part in parts]


def _shaped(tensor: tf.Tensor, spec: Any) -> tf.Tensor:
    tensor.set_shape(spec.shape)
    return tensor


def _layouts(leaf: Any) -> list[Layout]:
    """The layouts of the components of a leaf of a batch."""
    if is_dense(leaf):
        return [by_batch() if leaf.shape.rank else REPLICATED]
    return [REPLICATED for _ in tf.nest.flatten(leaf, expand_composites=True)]


def _devices(strategy: Any) -> tuple[str, ...]:
    return tuple(strategy.extended.worker_devices)


def _distributed(function: Any) -> dict[int, Any]:
    """The variables with a copy for each replica that a function uses, by the id of the handle in it."""
    containers = {
        id(variable.handle): tf_replicas.container_of(variable) for variable in function.graph.variables
    }
    return {
        key: container
        for key, container in containers.items()
        if isinstance(container, tf.distribute.DistributedValues)
    }


def is_in_parts(variable: Any) -> bool:
    """Whether each replica holds a part of a variable with copies."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return bool(on_read and variable.aggregation == tf.VariableAggregation.SUM)


def copies_of(function: Any) -> dict[int, list[tf.Tensor]]:
    """The handles of the copies of each variable that a function uses, by the id of the handle in it."""
    return {
        key: [copy.handle for copy in container.values] for key, container in _distributed(function).items()
    }


class SingleProgram(Program):
    """A model's train or test step as one device runs it, on the whole batch.

    Args:
        model: a compiled Keras model under a strategy of dtrain's.
        layout: how the strategy's replicas are distributed.
        training: True for the train step, False for the test step.
    """

    compiled = False

    def __init__(self, model: Any, layout: ReplicaLayout, *, training: bool) -> None:
        self._model = model
        self._layout = layout
        self._name = "train_step" if training else "test_step"
        self._training = training
        # The results of Keras' own steps are computed once, after the last step of a call.
        self.stock = step_is_stock(model, self._name)

    @property
    def findings(self) -> dict[str, Any] | None:
        """Nothing: what a step computes does not depend on what was found before."""
        return {}

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        del found

    def _stock_step(self, batch: Any) -> Any:
        return run_step(self._model, self._name, batch, stock=self.stock)


class PartitionedProgram(SingleProgram):
    """The step, partitioned over the replicas."""

    def __init__(self, model: Any, layout: ReplicaLayout, *, training: bool) -> None:
        super().__init__(model, layout, training=training)
        self.compiled = bool(model.jit_compile)
        self._steps: dict[str, DividedFunction] = {}
        self._step: DividedFunction | None = None
        self._filled = False
        self._results: DividedFunction | None = None

    def prepare(self, spec: Any, phase: str | None, *, filled: bool = False) -> bool:
        """As `Program.prepare`: traces the step and, where they are the logs, the metrics' results."""
        spec = without_optional_specs(spec)
        key = f"{spec} {phase}"
        if key not in self._steps:
            sums = keras_optimizers.accumulators_of(self._model.optimizer) if phase == PARTS else ()
            layout = replace(self._layout, gradient_hook=None) if phase == WHOLE else self._layout
            self._steps[key] = self._divided(
                self._stock_step, spec, layout, in_parts=sums, compiled=self.compiled
            )
            self._divide_results()
        self._step = self._steps[key]
        self._filled = filled and self._step.differs_if_filled
        return self._filled

    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`.

        Raises:
            RuntimeError: `prepare` was not called.
        """
        del phase
        if self._step is None:
            raise RuntimeError("a step is run before it was prepared")
        outputs = self._step([without_optionals(part) for part in parts], sizes, filled=self._filled)
        return outputs, self._step.waited() if self._training else None

    @property
    def plan(self) -> Plan | None:
        """As `Program.plan`."""
        return None if self._step is None else self._step.plan

    def results(self) -> Any:
        """The metrics over all steps since they were reset."""
        if self._results is None:  # there was no batch
            self._divide_results()
        return {} if self._results is None else self._results([])

    def _divide_results(self) -> None:
        """Traces the metrics' results, again after metrics were added, and divides them.

        A step of the user's own may never update its metrics, which then have no result.
        """
        if self.stock:
            self._results = self._divided(lambda _: self._model.get_metrics_result(), None, self._layout)

    def _divided(
        self, function: Callable[..., Any], spec: Any, layout: ReplicaLayout, **how: Any
    ) -> DividedFunction:
        return DividedFunction(function, spec, self._model.distribute_strategy, layout, **how)
