"""Restores the state of a `fit` from a checkpoint: `_TABLE` says what is restored at which moment of `fit`.

Reading the checkpoint is not done here.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any

from dtrain.base.log import logger
from dtrain.base.words import counted
from dtrain.checkpoint.callback_state import CallbackStates, is_saved
from dtrain.checkpoint.content import LoadedCheckpoint, restore_findings, restore_generators
from dtrain.checkpoint.folder import CheckpointFolder
from dtrain.engine.feed.position import is_position, is_whole
from dtrain.engine.loops.loop import current_loop
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.telemetry import events
from dtrain.upstream import keras_models


class Moment(enum.Enum):
    """The moments of `fit` at which state is restored, in order."""

    FIT_BEGINS = "before the user's callbacks begin"
    CALLBACKS_BEGUN = "after `on_train_begin` of all callbacks"
    EPOCH_BEGINS = "before the user's callbacks begin the first epoch"
    FIRST_STEP = "before the first step"
    FIT_ENDS = "after `on_train_end` of all callbacks"


class Case(enum.Enum):
    """How far the training was when the checkpoint was taken."""

    BETWEEN_EPOCHS = "its next epoch had not begun"
    WITHIN_EPOCH = "an epoch had begun"
    TRAINED = "all epochs were done, but not what comes after them"
    COMPLETE = "nothing was left to do"


def is_state(state: Mapping[str, Any]) -> bool:
    """Whether a worker's state in a checkpoint has the form of those that a `fit` saves."""
    position, callbacks, findings = (state.get(name) for name in ("position", "callbacks", "findings"))
    return (
        all(is_whole(state.get(name)) for name in ("epoch", "epochs", "done"))
        and isinstance(state.get("stopped"), bool)
        and is_position(position)
        and isinstance(findings, dict)
        and all(isinstance(findings.get(name, ""), dict | None) for name in ("train", "test"))
        and isinstance(callbacks, dict)
        and is_saved(callbacks)
    )


class NewTraining:
    """No checkpoint was found: nothing is restored.

    Attributes:
        epoch, done: the epoch in which training starts, counted from 0, and how many of its steps are done.
        total: how many steps of all epochs are done.
        trained: whether no epoch is left.
        complete: whether nothing at all is left to do.
        position: the iterator's position in the data to save; None to ask the iterator.
    """

    epoch = 0
    done = 0
    total = 0
    trained = False
    complete = False
    position: Any = None

    def at(self, moment: Moment) -> bool:
        """Restores what is due at a moment, at its first call; returns whether anything was due."""
        return False


class Restoration(NewTraining):
    """Resumes a `fit` from a checkpoint; the attributes are those of `NewTraining`.

    Args:
        found: the checkpoint.
        folder: the folder of the checkpoint.
        layout: the strategy's layout.
        model: the model that `fit` trains.
        epochs: the `epochs` argument of `fit`.
        callbacks: the states of the user's callbacks.
        iterator: the epoch iterator that `fit` trains on.
    """

    def __init__(
        self,
        found: LoadedCheckpoint,
        folder: CheckpointFolder,
        layout: ReplicaLayout,
        *,
        model: Any,
        epochs: int,
        callbacks: CallbackStates,
        iterator: Any,
    ) -> None:
        self._found = found
        self._worker = worker = found.worker(layout.worker)
        self._folder = folder
        self._layout = layout
        self._model = model
        self._epochs = epochs
        self._callbacks = callbacks
        self._iterator = iterator
        self.epoch, self.done, self.total = worker["epoch"], worker["done"], found.step
        self.trained = self.epoch >= epochs or (worker["stopped"] and epochs <= worker["epochs"])
        self.complete = self.trained and found.finished
        if self.trained:
            case = Case.COMPLETE if self.complete else Case.TRAINED
            self.position = worker["position"]  # the iterator reads nothing
        else:
            case = Case.BETWEEN_EPOCHS if found.boundary else Case.WITHIN_EPOCH
        self._due = dict(_TABLE[case])

    def at(self, moment: Moment) -> bool:  # noqa: D102
        actions = self._due.pop(moment, ())
        for action in actions:
            action(self)
        return bool(actions)

    def _begin(self) -> None:
        # The launcher compares the steps of errors across attempts, so it needs this attempt's first step.
        events.emit(events.TrainingResumes(self.total, self.done))
        if self._found.replicas == self._layout.replicas:
            restore_findings(self._model, self._worker["findings"])
        # Callbacks must see the restored weights before the first epoch.
        self._folder.restore(self._found)
        self._callbacks.prepare_logs(self._worker["callbacks"])
        first = max(self.epoch, self._epochs) if self.trained else self.epoch
        keras_models.set_first_epoch(self._model, first)
        same_workers = self._found.workers == self._layout.workers
        logger.log(logging.INFO if same_workers else logging.WARNING, "%s", self._summary())

    def _summary(self) -> str:
        checkpoint = self._found
        if self.trained:
            return f"The training in {self._folder.path} is complete: nothing is left to do."
        place = f"epoch {self.epoch + 1} of {self._epochs}"
        if self.done:
            place += f", after {self.done} of its steps"
        steps, writers = counted(checkpoint.step, "step"), counted(checkpoint.workers, "worker")
        line = f"Training resumes in {place} ({steps} in all), from {checkpoint.path}."
        if checkpoint.workers != self._layout.workers:
            line += (
                f" It was written by {writers}; now there are {self._layout.workers}, with the same global "
                "batches: each worker's part of them has a different size."
            )
        return line

    def _restore_variables(self) -> None:
        """Restores the variables again: callbacks may have changed them in `on_train_begin`."""
        self._folder.restore_variables(self._found)

    def _restore_callbacks(self) -> None:
        # Training was stopped by a callback, and now continues with more epochs: the callbacks start anew.
        anew = self._worker["stopped"] and not self.trained
        self._restore_history() if anew else self._give_callbacks(only_history=False)

    def _restore_history(self) -> None:
        self._give_callbacks(only_history=True)

    def _give_callbacks(self, *, only_history: bool) -> None:
        history = getattr(self._model, "history", None)
        self._callbacks.restore(self._worker["callbacks"], history, only_history=only_history)

    def _reset_metrics(self) -> None:
        """Resets the metrics, as `fit` did before: the checkpoint's values are those of the last epoch."""
        self._model.reset_metrics()

    def _continue_metrics(self) -> None:
        """Keeps the metrics' values: they cover the steps of this epoch that are done."""
        current_loop().epoch_resumed = True

    def _restore_position(self) -> None:
        self._iterator.open(self._worker["position"])
        restore_generators(self._worker)


_Action = Callable[[Restoration], None]
_BEGIN = {Moment.FIT_BEGINS: (Restoration._begin,)}
_STATE = (Restoration._restore_variables, Restoration._restore_callbacks)
_TABLE: Mapping[Case, Mapping[Moment, tuple[_Action, ...]]] = {
    Case.BETWEEN_EPOCHS: {
        **_BEGIN,
        Moment.EPOCH_BEGINS: (*_STATE, Restoration._reset_metrics),
        Moment.FIRST_STEP: (Restoration._restore_position,),
    },
    Case.WITHIN_EPOCH: {
        **_BEGIN,
        # By now the callbacks' `on_epoch_begin` was called, as before the checkpoint was taken.
        Moment.FIRST_STEP: (*_STATE, Restoration._continue_metrics, Restoration._restore_position),
    },
    # Restore before the callbacks' `on_train_end`, which is still to come.
    Case.TRAINED: {
        **_BEGIN,
        Moment.CALLBACKS_BEGUN: _STATE,
        Moment.FIT_ENDS: (Restoration._restore_history,),
    },
    Case.COMPLETE: {**_BEGIN, Moment.FIT_ENDS: _STATE},
}
