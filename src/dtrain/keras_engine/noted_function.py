"""Events of a function of Keras' own, which emits none itself.

It changes neither what the function is given nor what it returns.
"""

from __future__ import annotations

import contextlib
from typing import Any

from dtrain import events
from dtrain.upstream import keras as upstream_keras


class NotedFunction:
    """A function that `fit`, `evaluate` or `predict` calls; each call emits the events of its steps."""

    def __init__(self, function: Any, model: Any, *, train: bool) -> None:
        self._function = function
        self._model = model
        self._train = train
        self._called = False

    def __call__(self, data: Any) -> Any:
        """What the function returns for an iterator, or for a list of batches.

        Raises:
            StopIteration: if the iterator has no batch left; or OutOfRangeError.
        """
        events.emit(events.InputBegins(data))
        events.emit(events.StepBegins())
        try:
            outputs = self._function(data)
        except BaseException:
            events.emit(events.PartChanges("callbacks"))
            raise
        steps = self._model.steps_per_execution
        events.emit(events.StepsEnd(steps, self._train, usual=self._called))
        events.emit(events.CallEnds(self._train))
        self._called = True
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def steps_counted(model: Any) -> int:
    """The steps that a model's optimizer has counted; 0 where one of the user's own does not count."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    with contextlib.suppress(AttributeError):
        return int(upstream_keras.iterations_of(optimizer).numpy())
    return 0
