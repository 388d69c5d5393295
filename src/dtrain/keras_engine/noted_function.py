"""Notes of what a function of `fit`'s does, for whoever watches the process: a launcher, or a report.

It changes neither what the function is given nor what it returns.
"""

from __future__ import annotations

import contextlib
from typing import Any

from dtrain import progress
from dtrain.upstream import keras as upstream_keras


class NotedFunction:
    """A function that `fit`, `evaluate` or `predict` calls, with a note of each call for whoever watches."""

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
        if self._train:
            note_first_step(self._model)
        progress.input_begins(data)
        reading = progress.step_begins()
        try:
            outputs = self._function(data)
        except BaseException:
            progress.phase("callbacks")
            raise
        steps = self._model.steps_per_execution
        progress.step_ends(reading, None, train=self._train, usual=self._called, steps=steps)
        progress.call_ends(train=self._train)
        self._called = True
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def note_first_step(model: Any) -> None:
    """The first step of a `fit` says where the training stands, which a checkpoint may have set."""
    if not progress.needs_step():
        return
    done = 0
    if progress.watched():
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        with contextlib.suppress(AttributeError):  # an optimizer of the user's own need not count
            done = int(upstream_keras.iterations_of(optimizer).numpy())
    progress.training_from(done)
