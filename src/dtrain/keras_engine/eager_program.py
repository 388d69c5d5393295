"""Computes one step without tracing it, on the whole batch, as one device does: for `run_eagerly=True`.

Code that is not traced cannot be divided. So it runs once, on the variables' first copies, and the other
copies are made equal afterwards: right, but no faster than one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dtrain.keras_engine.partitioned_steps import SingleProgram, is_in_parts
from dtrain.keras_engine.rows import is_dense, joined_rows, without_optionals
from dtrain.keras_engine.single_program import as_single_program, making_variables


class EagerProgram(SingleProgram):
    """The step, run eagerly."""

    def run(self, parts: Sequence[Any], sizes: Any, phase: str | None = None) -> tuple[Any, Any]:
        """As `Program.run`."""
        del sizes, phase
        batch = joined_parts([without_optionals(part) for part in parts])
        with on_first_copies(self._model.distribute_strategy):
            return self._stock_step(batch), None

    def results(self) -> Any:
        """The metrics over all steps since they were reset."""
        with on_first_copies(self._model.distribute_strategy):
            return self._model.get_metrics_result()


def joined_parts(parts: Sequence[Any]) -> Any:
    """The batch that was divided into these parts."""
    first = parts[0]

    def one(leaves: Sequence[Any]) -> Any:
        whole = leaves[0] is None or (is_dense(leaves[0]) and leaves[0].shape.rank == 0)
        return leaves[0] if whole else joined_rows(leaves)

    each = zip(*(tf.nest.flatten(part) for part in parts), strict=True)
    return tf.nest.pack_sequence_as(first, [one(leaves) for leaves in each])


@contextlib.contextmanager
def on_first_copies(strategy: Any) -> Iterator[None]:
    """A context for code that runs eagerly as on one device; the copies are equal again at its end."""
    for variable in filter(is_in_parts, _copied_variables(strategy)):
        first, *others = variable.values
        first.assign(tf.add_n([copy.value() for copy in variable.values]))
        for copy in others:
            copy.assign(tf.zeros_like(copy))
    try:
        with making_variables(strategy), as_single_program():
            yield
    finally:
        for variable in _copied_variables(strategy):
            first, *others = variable.values
            for copy in () if is_in_parts(variable) else others:
                copy.assign(first)


def _copied_variables(strategy: Any) -> list[Any]:
    """The variables of which each replica of this process has a copy."""
    return [each for each in strategy.extended.dtrain_variables.values() if hasattr(each, "values")]
