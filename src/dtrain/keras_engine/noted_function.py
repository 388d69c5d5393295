"""Emits the engine's events around a function that emits none: Keras' own ones, and `PredictFunction`.

It changes neither the arguments nor the results of the function.
"""

from __future__ import annotations

import contextlib
from typing import Any

from dtrain import events
from dtrain.upstream import keras as upstream_keras


class NotedFunction:
    """Wraps a function that `fit`, `evaluate` or `predict` calls; each call emits the events of its steps."""

    def __init__(self, function: Any, model: Any, *, train: bool) -> None:
        self._function = function
        self._model = model
        self._train = train
        self._called = False

    def __call__(self, data: Any) -> Any:
        """Calls the function with an iterator or a list of batches; returns what the function returns.

        Raises:
            StopIteration: the iterator has no batch left; a TensorFlow iterator raises OutOfRangeError.
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
    """The steps that a model's optimizer has counted; 0 if a user's own optimizer counts none."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    with contextlib.suppress(AttributeError):
        return int(upstream_keras.iterations_of(optimizer).numpy())
    return 0
