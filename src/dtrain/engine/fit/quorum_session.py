"""Where a worker of a job with a quorum trains: in which epoch, and at which position in its data.

It wraps the session that saves checkpoints, which only the first worker has. The weights are the matter of
`quorum_rounds.py`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import keras

from dtrain.base.log import logger
from dtrain.engine.feed.position import is_position, is_whole
from dtrain.engine.loops.fit_session import FitSession
from dtrain.engine.loops.loop import steps_counted
from dtrain.engine.synchronisation.quorum_rounds import QuorumRounds
from dtrain.errors import AuthenticationError
from dtrain.process_group.plain_values import decode, encode
from dtrain.telemetry import events
from dtrain.upstream import keras_models


@dataclass(frozen=True)
class TrainingPlace:
    """Where a worker trains.

    Attributes:
        epoch: the epoch, counted from 0.
        done: completed steps of it.
        total: completed steps of all epochs.
        position: the position in the data, as `DataFeed.position` returns it.
        history: the epochs and the logs of the `History`.
    """

    epoch: int
    done: int
    total: int
    position: dict[str, Any]
    history: dict[str, Any]

    @classmethod
    def of_text(cls, text: str) -> TrainingPlace:
        """The place in a text of `encode`.

        Raises:
            AuthenticationError: there is none.
        """
        try:
            found = decode(text)
            epoch, done, total, position, history = found
        except ValueError:
            epoch = done = total = position = history = None
        numbers = all(map(is_whole, (epoch, done, total)))
        if not (numbers and is_position(position) and _is_history(history)):
            raise AuthenticationError(
                "The state that another worker gave says nothing of where it trains.",
                hint="all workers must run the same version of dtrain",
            )
        return cls(epoch, done, total, position, history)


def _is_history(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("epoch"), list)
        and isinstance(value.get("history"), dict)
        and all(isinstance(series, list) for series in value["history"].values())
    )


class QuorumSession(FitSession):
    """Takes part in one `fit` of a worker of a job with a quorum.

    Args:
        inner: the session that saves checkpoints, or one that does nothing.
        rounds: the rounds of the `fit`.
        epochs: the `epochs` argument of `fit`.
    """

    def __init__(self, inner: FitSession, rounds: QuorumRounds, *, epochs: int) -> None:
        self._inner, self._rounds, self._epochs = inner, rounds, epochs
        self._model = rounds.model
        self._epoch = 0
        self._iterator: Any = None
        self._history: dict[str, Any] | None = None  # to restore, where this process joins others

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The callbacks, after one that joins the others."""
        first = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self._begin(callbacks),
            on_epoch_begin=lambda epoch, logs: self._epoch_begins(epoch),
        )
        last = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self._epoch_ended())
        return [first, *self._inner.callbacks(callbacks), last]

    def attach(self, iterator: Any) -> None:
        """Takes the epoch iterator that `fit` trains on."""
        self._iterator = iterator
        self._inner.attach(iterator)

    def between_steps(self, iterator: Any, done: int) -> None:
        """Goes to where the others are, saves a checkpoint, and gives the state to those that join."""
        rounds = self._rounds
        if rounds.over:
            iterator.end_epoch()
            return
        if rounds.elsewhere is not None:
            self._go(iterator, TrainingPlace.of_text(rounds.elsewhere))
            return
        self._inner.between_steps(iterator, done)
        rounds.begins = self._text(iterator.position(), done)
        if rounds.gives:
            rounds.gives = False
            rounds.client.give(rounds.fit, rounds.state())

    def max_steps(self) -> int | None:
        """As the session that saves checkpoints asks for."""
        return self._inner.max_steps()

    def end(self, history: Any) -> None:
        """Tells the others that the `fit` has ended; the first one gives its state to those that are late."""
        rounds = self._rounds
        self._restore_history(history)
        if not rounds.over:
            self._epoch = self._epochs
            rounds.begins = self._text(self._iterator.position(ended=True), 0, history)
        history.quorum_report = rounds.client.end(rounds.fit, rounds.state)
        rounds.client.in_fit = False
        self._inner.end(history)
        keras_models.set_first_epoch(self._model, None)

    def left(self) -> None:
        """As the session that saves checkpoints."""
        self._rounds.client.in_fit = False
        keras_models.set_first_epoch(self._model, None)
        self._inner.left()

    def _begin(self, callbacks: list[Any]) -> None:
        joined = self._rounds.join()
        place = None if joined.about is None else TrainingPlace.of_text(joined.about)
        if place is not None and (place.epoch or place.done):  # the others have trained in this `fit`
            self._history = place.history
            for callback in callbacks:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True  # the lines of an earlier process stay
        if joined.round is None:  # and have ended it
            keras_models.set_first_epoch(self._model, self._epochs)
            self._inner.joins(self._epochs, 0, steps_counted(self._model))
        elif place is not None:
            self._rounds.elsewhere = joined.about
            if self._history is not None:
                epoch, done = place.epoch + 1, place.done
                logger.info("This worker joins the others in epoch %d, after %d of its steps.", epoch, done)
                events.emit(events.TrainingResumes(place.total, place.done))
            keras_models.set_first_epoch(self._model, place.epoch)
            self._inner.joins(place.epoch, place.done, place.total)

    def _epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        self._restore_history(getattr(self._model, "history", None))

    def _epoch_ended(self) -> None:
        """The first worker's callbacks decide when to stop: those of one that joined later began anew."""
        if self._model.stop_training and not (self._rounds.leads or self._rounds.over):
            self._model.stop_training = False

    def _restore_history(self, history: Any) -> None:
        if self._history is not None and history is not None:
            found, self._history = copy.deepcopy(self._history), None
            history.epoch, history.history = found["epoch"], found["history"]

    def _go(self, iterator: Any, place: TrainingPlace) -> None:
        """Goes to the position of the others; where it is in a later epoch, this one ends first."""
        if place.epoch > self._epoch:
            self._rounds.skipped = _logs_of(place.history, self._epoch)
            iterator.end_epoch()
            return
        self._rounds.elsewhere = None
        iterator.reopen(place.position)
        self._inner.joins(place.epoch, place.done, place.total)
        self._rounds.begins = encode([place.epoch, place.done, place.total, place.position, place.history])

    def _text(self, position: dict[str, Any], done: int, history: Any = None) -> str:
        """The text about this worker's place, from which others go on."""
        history = history or getattr(self._model, "history", None)
        logs = {
            name: [float(value) for value in series if isinstance(value, int | float)]
            for name, series in getattr(history, "history", {}).items()
        }
        past = {"epoch": [int(epoch) for epoch in getattr(history, "epoch", [])], "history": logs}
        return encode([self._epoch, done, steps_counted(self._model), position, past])


def _logs_of(history: dict[str, Any], epoch: int) -> dict[str, float] | None:
    """The logs of an epoch's training in a `History`; None if it has none."""
    if epoch not in history["epoch"]:
        return None
    place = history["epoch"].index(epoch)
    series = {name: values for name, values in history["history"].items() if not name.startswith("val_")}
    return {name: float(values[place]) for name, values in series.items() if place < len(values)} or None
