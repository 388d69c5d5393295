"""Computes one step on all replicas by one program: the step of one device, traced once and partitioned.

It implements `steps.Program`. How a traced function is divided is decided in `partition/`, which knows
nothing of Keras; how many steps a call makes, in `step_function.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.rows import (
    batch_rows,
    is_dense,
    joined_rows,
    map_leaves,
    without_optionals,
)
from dtrain.keras_engine.single_program import as_single_program, making_variables
from dtrain.keras_engine.steps import Program, silent_results, step_is_stock
from dtrain.partition.layouts import REPLICATED, Layout
from dtrain.partition.partition import Partitioned, by_batch
from dtrain.partition.replicas import Replicas
from dtrain.upstream import tensorflow as upstream_tf


class DividedFunction:
    """A function of a batch, traced as one device runs it, which the replicas compute together.

    Args:
        function: the function.
        spec: the spec of the whole batch, without Optionals.
        strategy: the strategy of the variables that the function uses.
        layout: how the strategy's replicas are distributed.
    """

    def __init__(self, function: Callable[..., Any], spec: Any, strategy: Any, layout: ReplicaLayout) -> None:
        self._replicas = layout.replicas
        leaves = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]
        rows = [leaf.shape[0] for leaf in leaves if leaf.shape.rank]
        self._some_idle = not rows or rows[0] is None or rows[0] < layout.replicas
        components = [each for leaf in leaves for each in tf.nest.flatten(leaf, expand_composites=True)]

        def traced(*tensors: Any) -> Any:
            given = iter(tf.nest.pack_sequence_as(leaves, tensors, expand_composites=True))
            filled = [leaf if leaf is None else next(given) for leaf in tf.nest.flatten(spec)]
            with as_single_program():
                return function(tf.nest.pack_sequence_as(spec, filled))

        with making_variables(strategy):
            self._function = upstream_tf.made_for_each_model(traced).get_concrete_function(*components)
        variables = _distributed(self._function)

        def copies(captured: Any) -> list[Any] | None:
            variable = variables.get(id(captured))
            return None if variable is None else [copy.handle for copy in variable.values]

        self._partitioned = Partitioned(
            self._function,
            [layout for leaf in leaves for layout in _layouts(leaf)],
            Replicas(layout.local_replicas, layout.replicas, layout.first_replica, _devices(strategy)),
            some_idle=self._some_idle,
            copies=copies,
            in_parts=lambda captured: id(captured) in variables and _is_in_parts(variables[id(captured)]),
        )

    def __call__(self, parts: Sequence[Any]) -> Any:
        """Makes the operations that compute the function, in the graph that is being traced.

        Args:
            parts: a batch for each replica of this process.

        Returns:
            What the function returns for the whole batch.
        """
        leaves = [[leaf for leaf in tf.nest.flatten(part) if leaf is not None] for part in parts]
        sizes = tf.ones([self._replicas], tf.int32)
        if leaves:
            sizes = tf.stack([batch_rows(part) for part in leaves])
        if leaves and self._some_idle:
            leaves = _with_rows(leaves, sizes)
        inputs: list[list[tf.Tensor]] = []
        for each in zip(*leaves, strict=True):
            given = each if is_dense(each[0]) else [joined_rows(each)] * len(each)
            components = [tf.nest.flatten(leaf, expand_composites=True) for leaf in given]
            inputs += map(list, zip(*components, strict=True))
        found = iter(self._partitioned(sizes, inputs))
        return tf.nest.map_structure(
            lambda spec: spec if spec is None else _shaped(next(found), spec),
            self._function.structured_outputs,
            expand_composites=True,
        )


def _with_rows(parts: Sequence[Sequence[Any]], sizes: tf.Tensor) -> list[list[Any]]:
    """Gives each part without rows the first row of the first part; a batch without rows stays as it is."""
    some = tf.reduce_sum(sizes) > 0

    def with_row(leaf: Any, first: Any, empty: Any) -> Any:
        if not is_dense(leaf) or not leaf.shape.rank or (leaf.shape[0] or 0) > 0:
            return leaf

        def one_row() -> Any:
            zeros = tf.zeros(tf.concat([[1], tf.shape(first)[1:]], axis=0), first.dtype)
            return tf.concat([first[:1], zeros], axis=0)[:1]

        found = tf.cond(empty, one_row, lambda: leaf)
        found.set_shape([None, *leaf.shape[1:]])
        return found

    return [
        [
            with_row(leaf, first, tf.logical_and(some, tf.equal(sizes[place], 0)))
            for leaf, first in zip(part, parts[0], strict=True)
        ]
        for place, part in enumerate(parts)
    ]


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
    found = {id(each.handle): upstream_tf.container_of(each) for each in function.graph.variables}
    return {key: each for key, each in found.items() if isinstance(each, tf.distribute.DistributedValues)}


def _is_in_parts(variable: Any) -> bool:
    """Whether each replica holds a part of a variable."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return bool(on_read and variable.aggregation == tf.VariableAggregation.SUM)


class PartitionedProgram(Program):
    """A model's train or test step, partitioned over the replicas.

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
        # The results of Keras' own steps are computed once, after the last step of a call.
        self.stock = step_is_stock(model, self._name)
        self._steps: dict[str, DividedFunction] = {}
        self._step: DividedFunction | None = None
        self._results: DividedFunction | None = None

    def prepare(self, spec: Any) -> None:
        """As `Program.prepare`: traces the step and the metrics' results, and divides both."""
        spec = map_leaves(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec)
        key = str(spec)
        if key not in self._steps:
            self._steps[key] = self._divided(self._stock_step, spec)
            self._results = self._divided(lambda _: self._model.get_metrics_result(), None)
        self._step = self._steps[key]

    @property
    def findings(self) -> dict[str, Any] | None:
        """Nothing: what a step computes does not depend on what was found before."""
        return {}

    @findings.setter
    def findings(self, found: dict[str, Any]) -> None:
        del found

    def run(self, parts: Sequence[Any], total: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`."""
        del total, phase
        return prepared(self._step)([without_optionals(part) for part in parts]), None

    def results(self) -> Any:
        """The metrics over all steps since they were reset."""
        return prepared(self._results)([])

    def _stock_step(self, batch: Any) -> Any:
        step = getattr(self._model, self._name)
        if not self.stock:
            return step(batch)
        with silent_results(self._model):
            return step(batch)

    def _divided(self, function: Callable[..., Any], spec: Any) -> DividedFunction:
        return DividedFunction(function, spec, self._model.distribute_strategy, self._layout)


def prepared(function: DividedFunction | None) -> DividedFunction:
    """The function, which `PartitionedProgram.prepare` has made.

    Raises:
        RuntimeError: it was not called.
    """
    if function is None:
        raise RuntimeError("a step is run before it was prepared")
    return function
