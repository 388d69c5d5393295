"""Emits the engine's events around a function that emits none: Keras' own ones, and `PredictFunction`.

It changes neither the arguments nor the results of the function.
"""

from __future__ import annotations

from typing import Any

from dtrain.engine.loops.loop import steps_counted
from dtrain.telemetry import events


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
        usual = self._model.steps_per_execution
        # Reading the optimizer's count waits for the device, so only where a call may run fewer steps.
        counts = self._train and usual > 1
        counted = steps_counted(self._model) if counts else 0
        events.emit(events.InputBegins(data))
        events.emit(events.StepBegins())
        try:
            outputs = self._function(data)
        except BaseException:
            events.emit(events.PartChanges("callbacks"))
            raise
        steps = sum(getattr(batch, "steps", 1) for batch in data) if isinstance(data, list) else usual
        if counts:  # at the end of the data, the function runs fewer steps
            steps = min(steps, steps_counted(self._model) - counted) or steps
        events.emit(events.StepsEnd(steps, self._train, usual=self._called))
        events.emit(events.CallEnds(self._train))
        self._called = True
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
