"""Local SGD: each replica runs one device's step on its own rows and its own copies of the variables.

When the copies are averaged is decided in `weight_averages.py`. It implements `steps.Program`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dtrain.engine.batches.batch_rows import (
    any_rows,
    batch_rows,
    local_parts,
    map_leaves,
    without_optional_specs,
    without_optionals,
)
from dtrain.engine.replica.context import local_update
from dtrain.engine.replica.gradient_marks import GradientMarks
from dtrain.engine.replica.thread_state import thread_state
from dtrain.engine.step.partitioned_steps import (
    PartitionedProgram,
    copies_of,
    leaves_there,
    traced_as_one_device,
)
from dtrain.engine.step.replica_communication import StrategyCollectives
from dtrain.errors import StepError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.interfaces.scope_checks import check_metrics
from dtrain.upstream import tf_replicas, tf_tracing


class OwnSteps(PartitionedProgram):
    """The train step of local SGD."""

    _own: Any = None
    _structure: Any = None  # of what the step returns

    def __init__(self, model: Any, layout: ReplicaLayout, *, training: bool) -> None:
        super().__init__(model, layout, training=training)
        self._communication = StrategyCollectives(model.distribute_strategy, layout, GradientMarks())
        self._sums_function = tf_tracing.made_for_each_model(
            lambda returned: self._communication.sums(returned, nested=False)
        )
        self._alone = replace(layout, workers=1, worker=0)
        self._result_functions: dict[str, Callable[[], Any]] = {}

    def prepare(self, spec: Any, phase: str | None, *, filled: bool = False) -> bool:
        """As `Program.prepare`: traces the step once, for any number of rows."""
        del phase, filled
        strategy = self._model.distribute_strategy
        with thread_state.having(averaged_optimizer=self._model.optimizer):
            spec = map_leaves(any_rows, without_optional_specs(spec))
            self._own = traced_as_one_device(self._stock_step, spec, strategy, compiled=self.compiled)
        check_metrics(self._model, self._layout)  # the trace may have made some
        self._divide_results()
        self._result_functions.clear()
        return False

    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`; a replica without rows makes no step.

        Raises:
            StepError: the step returns something else than numbers, or runs eagerly and a worker has no rows.
        """
        del phase
        batches = [without_optionals(part) for part in parts]
        own = [batch_rows(batch) for batch in batches]
        if self._model.run_eagerly:
            sizes = self._communication.sizes(batches) if sizes is None else sizes
            return self._sums(self._eagerly(batches, sizes), own), None
        results = [self._on_replica(place, batch) for place, batch in enumerate(batches)]
        return self._sums(results, own), None

    def outputs(self, returned: Any) -> Any:
        """As `Program.outputs`: the means over the replicas of this process, weighted by their rows."""
        return self._means([[tf.add_n(values)] for values in returned]) if returned else {}

    def whole_outputs(self, returned: Any) -> Any:
        """As `Program.whole_outputs`: the means over all replicas."""
        return self._means(self._sums_function(returned)) if returned else {}

    def results(self) -> Any:
        """As `Program.results`, also outside of a traced function."""
        if "all" not in self._result_functions:
            self._result_functions["all"] = tf_tracing.made_for_each_model(super().results)
        return self._result_functions["all"]()

    def own_results(self) -> Any:
        """As `Program.own_results`."""
        if self._layout.workers == 1:
            return self.results()
        if "own" not in self._result_functions:
            own = self._divided(lambda _: self._model.get_metrics_result(), None, self._alone)
            self._result_functions["own"] = tf_tracing.made_for_each_model(lambda: own([]))
        return self._result_functions["own"]()

    def _eagerly(self, batches: list[Any], sizes: tf.Tensor) -> list[Any]:
        """What the step returns on each replica of this process; zeros for one without rows.

        Raises:
            StepError: a worker has no rows, so that it cannot know what the others' steps return.
        """
        strategy = self._model.distribute_strategy
        rows = sizes.numpy().reshape(self._layout.workers, -1)
        if not rows.any():
            return []
        if not rows.any(axis=1).all():
            raise StepError(
                f"Replicas train alone with run_eagerly=True, but a batch of {rows.sum()} rows leaves "
                f"some of the {self._layout.workers} workers without any.",
                hint="leave out run_eagerly, or let each batch have rows for all workers",
            )
        working = rows[self._layout.worker].nonzero()[0].tolist()

        def in_replica(batch: Any) -> Any:
            if tf_replicas.local_replica_index() not in working:
                return None
            with local_update():
                return self._stock_step(batch)

        outputs = strategy.run(in_replica, args=(tf_replicas.per_replica(batches),))
        results = local_parts(strategy, outputs)
        nothing = tf.nest.map_structure(tf.zeros_like, results[working[0]])
        return [results[place] if place in working else nothing for place in range(len(batches))]

    def _on_replica(self, place: int, batch: Any) -> Any:
        """What the step returns on a replica of this process; zeros if the replica has no rows."""
        function, strategy = self._own, self._model.distribute_strategy
        leaves = [tf.nest.flatten(leaf, expand_composites=True) for leaf in leaves_there(batch)]
        copies = copies_of(function)
        captured = [
            copies[id(capture)][place] if id(capture) in copies else capture
            for capture in function.captured_inputs
        ]
        given = [*(component for leaf in leaves for component in leaf), *captured]
        types = [tensor.dtype for tensor in function.outputs]
        shapes = [tensor.shape for tensor in function.outputs]

        def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
            outputs = tf.raw_ops.StatefulPartitionedCall(args=list(tensors), Tout=types, f=function)
            return list(outputs) if types else []

        compiled = tf.function(call, jit_compile=True) if self._model.jit_compile else call

        def step() -> list[tf.Tensor]:
            outputs = compiled(*given)
            for tensor, shape in zip(outputs, shapes, strict=True):
                tensor.set_shape(shape)
            return [*outputs, tf.constant(0)]

        def nothing() -> list[tf.Tensor]:
            return [
                *(tf.zeros(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)),
                tf.constant(0),
            ]

        with tf.device(strategy.extended.worker_devices[place]):
            outputs = list(tf.cond(batch_rows(batch) > 0, step, nothing))[:-1]
        return tf.nest.pack_sequence_as(function.structured_outputs, outputs, expand_composites=True)

    def _sums(self, each: Sequence[Any], sizes: Sequence[tf.Tensor]) -> Any:
        """What the steps of this process' replicas return, each number times its rows; and these rows.

        A list of lists for the numbers, and one for the rows; [] if the steps return nothing.
        """
        numbers = [list(map(tf.convert_to_tensor, tf.nest.flatten(result))) for result in each]
        if not any(numbers):
            return []
        for tensor in numbers[0]:
            if not tensor.dtype.is_floating or tensor.shape.rank != 0:
                raise StepError(
                    f"Replicas train alone, and train_step returned a tensor of type {tensor.dtype.name} and "
                    f"shape {tensor.shape}. Only a scalar of floats has a mean over the replicas.",
                    hint="return the loss and metrics as scalars, or leave out gradient_hook",
                )
        self._structure = tf.nest.map_structure(lambda _: None, each[0])
        parts = [
            [value * tf.cast(size, value.dtype) for value, size in zip(values, sizes, strict=True)]
            for values in zip(*numbers, strict=True)
        ]
        return [*parts, list(sizes)]

    def _means(self, totals: Sequence[Any]) -> Any:
        *sums, rows = (total[0] for total in totals)
        means = [tf.math.divide_no_nan(total, tf.cast(rows, total.dtype)) for total in sums]
        return tf.nest.pack_sequence_as(self._structure, means)
