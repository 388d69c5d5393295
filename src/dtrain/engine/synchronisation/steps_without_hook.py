"""The first steps of a model, in which gradients are all-reduced as they are, although there is a hook."""

from __future__ import annotations

from typing import Any

from dtrain.engine.loops.local_state import LocalState

WHOLE = "whole"
"""The phase of steps whose gradients are all-reduced without the strategy's hook."""


class StepsWithoutHook(LocalState):
    """Leaves out the gradient hook until the optimizer has taken so many steps.

    Args:
        model: a compiled model.
        start: the number of steps.
    """

    def __init__(self, model: Any, start: int) -> None:
        super().__init__()
        self._model = model
        self._start = start
        self._done = 0

    def next_run(self, most: int) -> tuple[str | None, int]:
        """`WHOLE`, at most until the last of these steps; then None."""
        if self._done < self._start:
            self._done = int(self._model.optimizer.iterations)
        first = self._start - self._done
        return (WHOLE, min(most, first)) if first > 0 else (None, most)
