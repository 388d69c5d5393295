"""Computes one step without tracing it, on the whole batch, as one device does: for `run_eagerly=True`.

Code that is not traced cannot be divided. So each process runs it alike, on the first copies of the
variables, and makes its other copies equal afterwards: right, but no faster than one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.batches.batch_rows import is_dense, without_optionals
from dtrain.engine.replica.gradient_marks import GradientMarks
from dtrain.engine.replica.single_program import as_single_program, making_variables
from dtrain.engine.step.partitioned_steps import SingleProgram, is_in_parts
from dtrain.engine.step.replica_communication import StrategyCollectives
from dtrain.interfaces.divided_weights import divided_dim
from dtrain.interfaces.replica_layout import ReplicaLayout

_warned = False


class EagerProgram(SingleProgram):
    """The step, run eagerly."""

    def __init__(self, model: Any, layout: ReplicaLayout, *, training: bool) -> None:
        global _warned
        super().__init__(model, layout, training=training)
        self._replicas = EagerReplicas(model.distribute_strategy, layout)
        if not _warned and layout.worker == 0:
            _warned = True
            logger.warning(
                "With run_eagerly=True each process computes the whole batch, as one device does: %d "
                "replicas are no faster than one, and no gradient hook is called.",
                layout.replicas,
            )

    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`."""
        del phase
        batch = self._replicas.whole([without_optionals(part) for part in parts], sizes)
        with self._replicas.as_one_device():
            return self._stock_step(batch), None

    def results(self) -> Any:
        """The metrics over all steps since they were reset."""
        with self._replicas.as_one_device():
            return self._model.get_metrics_result()


class EagerReplicas:
    """What eager code needs to run as on one device.

    Args:
        strategy: the strategy of the variables.
        layout: how the strategy's replicas are distributed.
    """

    def __init__(self, strategy: Any, layout: ReplicaLayout) -> None:
        self._strategy = strategy
        self._layout = layout
        self._communication = StrategyCollectives(strategy, layout, GradientMarks())

    def whole(self, parts: Sequence[Any], sizes: tf.Tensor | None) -> Any:
        """The batch that was divided into parts.

        Args:
            parts: of the replicas of this process.
            sizes: the rows of the parts of all replicas; None gathers them.
        """
        if sizes is None:
            sizes = self._communication.sizes(parts)

        def one(leaves: Sequence[Any]) -> Any:
            if leaves[0] is None or (is_dense(leaves[0]) and leaves[0].shape.rank == 0):
                return leaves[0]
            return self._communication.whole(leaves, sizes, self._layout.first_replica)

        by_leaf = zip(*(tf.nest.flatten(part) for part in parts), strict=True)
        return tf.nest.pack_sequence_as(parts[0], [one(leaves) for leaves in by_leaf])

    @contextlib.contextmanager
    def as_one_device(self) -> Iterator[None]:
        """A context for code that runs eagerly as on one device; the copies are equal again at its end.

        A variable of which each replica holds a part is whole meanwhile; afterwards the first replica of the
        job holds all of it. A variable that is divided is whole meanwhile, too, in memory of its own.
        """
        in_parts = self._in_parts()
        values = [[copy.value() for copy in variable.values] for variable in in_parts]
        sums = self._communication.sums(values, nested=False) if in_parts else ()
        for variable, total in zip(in_parts, sums, strict=True):
            _assign(variable, total[0])
        divided = [each for _, each in sorted(self._copied().items()) if divided_dim(each) is not None]
        try:
            with contextlib.ExitStack() as whole:
                for variable in divided:
                    whole.enter_context(variable.whole_on_one_device())
                with making_variables(self._strategy), as_single_program():
                    yield
        finally:
            for variable in self._copied().values():
                first, *others = variable.values
                if divided_dim(variable) is not None:
                    continue
                if not is_in_parts(variable):
                    for copy in others:
                        copy.assign(first)
                elif self._layout.worker > 0:
                    first.assign(tf.zeros_like(first))

    def _in_parts(self) -> list[Any]:
        """The variables of which each replica holds a part, the same ones on all workers.

        A worker may not have deleted a variable yet that nothing uses any more.
        """
        here = {number: variable for number, variable in self._copied().items() if is_in_parts(variable)}
        if self._layout.workers == 1:
            return list(here.values())
        numbers = tf.constant(sorted(here), tf.int64)
        ((of_all, *_),) = self._communication.gathers([[numbers] * self._layout.local_replicas])
        distinct, counts = np.unique(of_all, return_counts=True)
        return [here[int(number)] for number in distinct[counts == self._layout.replicas]]

    def _copied(self) -> dict[int, Any]:
        """The variables of which each replica of this process has a copy, by their numbers."""
        made = self._strategy.extended.dtrain_variables
        return {number: variable for number, variable in made.items() if hasattr(variable, "values")}


def _assign(variable: Any, whole: tf.Tensor) -> None:
    """Gives the first copy of a variable the whole value, and the others nothing."""
    first, *others = variable.values
    first.assign(whole)
    for copy in others:
        copy.assign(tf.zeros_like(copy))
