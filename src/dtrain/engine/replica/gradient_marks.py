"""Marks the gradients of a step that is traced as one device's program, for the strategy's gradient hook.

Gradients are marked where a tape gives them and where an optimizer takes them. Where the partitioned step
needs one whole, the hook reduces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrain.engine.batches.batch_rows import is_dense
from dtrain.partition.marks import marked


class GradientMarks:
    """The variables whose gradients were marked, by the number of the mark."""

    def __init__(self) -> None:
        self._variables: list[Any] = []

    def mark(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, of which those that a hook reduces are marked: not sparse ones, and not None."""
        return [
            marked(gradient, self._number(variable))
            if gradient is not None and is_dense(gradient)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def variables(self, marks: Sequence[int]) -> list[Any]:
        """The variables of these marks, as the program named them."""
        return [self._variables[mark] for mark in marks]

    def _number(self, variable: Any) -> int:
        for number, marked_variable in enumerate(self._variables):
            if marked_variable is variable:
                return number
        self._variables.append(variable)
        return len(self._variables) - 1
