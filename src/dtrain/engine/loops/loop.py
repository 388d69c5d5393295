"""A running `fit`, `evaluate` or `predict`: what it needs, and which one runs.

`fitting.py` makes a `Loop` before it calls Keras' own method. Where Keras calls dtrain back without
arguments, `current_loop` returns the loop. The loop over the calls of the train or test function is Keras'
own, not written here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.splitting import data_error_of
from dtrain.engine.loops.fit_session import FitSession
from dtrain.engine.loops.local_state import LocalState
from dtrain.process_group.running_operations import current_operation
from dtrain.telemetry import events
from dtrain.upstream import array_functions, keras_optimizers

# How Keras names what belongs to a loop, as `train_function`, and what stops it, as `stop_training`.
_WORDS = {
    "fit": ("train", "training"),
    "evaluate": ("test", "evaluating"),
    "predict": ("predict", "predicting"),
}


@dataclass(kw_only=True, eq=False)
class Loop:
    """One call of `fit`, `evaluate` or `predict`.

    Attributes:
        kind: "fit", "evaluate" or "predict"; "" if no loop runs.
        model: the model that is trained, evaluated or used to predict.
        every_batch: whether each call of the loop's function runs one step, because a callback needs each
            batch.
        session: is called between the steps.
        epochs: how often the loop reads its data: the epochs of a `fit`, the evaluations of its validation
            data, or 1.
        validation: the loop over the validation data of a `fit`; None for other loops.
        training_is_read: whether Keras has made the epoch iterator of a `fit` over its training data.
        local: what each replica of a `fit` holds by itself.
        callbacks: the callbacks of the loop, as Keras is given them.
        first_epoch: the number of the first epoch of a `fit`, from 1.
        epoch_resumed: whether the running epoch of a `fit` began in another process, and its metrics were
            restored.
        blocks: what the workers have done in the running epoch, under parameter servers; complete at its end.
        iterator: what the running call of the loop's function reads from.
    """

    kind: str = ""
    model: Any = None
    every_batch: bool = True
    session: FitSession = field(default_factory=FitSession)
    epochs: int = 0
    validation: Loop | None = None
    training_is_read: bool = False
    local: LocalState = field(default_factory=LocalState)
    callbacks: Any = None
    first_epoch: int = 1
    epoch_resumed: bool = False
    blocks: Any = None
    iterator: Any = None

    def reads(self, iterator: Any) -> bool:
        """Whether this loop's own call reads from an iterator, and not a `train_on_batch` in a callback."""
        return iterator is not None and iterator is self.iterator

    @property
    def function(self) -> Any:
        """The model's function that the loop calls; None if no loop runs."""
        return getattr(self.model, f"{_WORDS[self.kind][0]}_function") if self.kind else None

    def begin_epoch(self, feed: Any, ended: int) -> None:
        """Notes that an epoch over a data feed begins, after so many that have ended."""
        if (operation := current_operation()) is not None:
            operation.feed = feed
            operation.begin_loop(self.first_epoch + ended if self.kind == "fit" else 0)

    def begin_call(self) -> bool:
        """Notes that a call begins; False, and Keras is told to stop, if the workers have agreed on that."""
        operation = current_operation()
        if operation is None or operation.begin_call():
            return True
        setattr(self.model, f"stop_{_WORDS[self.kind][1]}", True)
        return False

    def stop_with_others(self, feed: Iterator[Any]) -> None:
        """Agrees on the last call, where Keras has left the loop; makes the calls that others have begun.

        Args:
            feed: the data feed.
        """
        operation = current_operation()
        if operation is None:
            return
        operation.stop()
        while True:
            try:
                first, *last, iterator = next(feed)
            except StopIteration:
                return
            self._make_call(first, last[0] if last else first, iterator)

    def _make_call(self, first: int, last: int, iterator: Any) -> None:
        """Makes a call of the loop's function, with its callbacks, as Keras does."""
        given = self.callbacks
        given = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else given
        hook = f"on_{_WORDS[self.kind][0]}_batch"
        callbacks = keras.tree.flatten(given or [])
        for callback in callbacks:
            getattr(callback, f"{hook}_begin")(first)
        logs = self._results(iterator)
        for callback in callbacks:
            getattr(callback, f"{hook}_end")(last, logs)

    def _results(self, iterator: Any) -> dict[str, Any]:
        """Calls the loop's function; returns the logs of the call.

        Raises:
            StopIteration: the data has ended.
        """
        if self.kind == "predict":
            batches = [*itertools.islice(iterator, self.model.steps_per_execution)]
            if not batches:
                raise StopIteration
            return {"outputs": self.function(batches)}
        logs = self.function(iterator)
        return logs | {name: float(value) for name, value in logs.items() if tf.size(value) == 1}

    def of_new_iterator(self) -> Loop:
        """The loop that a new epoch iterator belongs to.

        Keras gives an epoch iterator its data only. The first one that a `fit` makes reads the training data,
        and all others the validation data.
        """
        if self.validation is None:
            return self
        if self.training_is_read:
            return self.validation
        self.training_is_read = True
        return self

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which this loop is the current one; it emits the events of the loop's two ends.

        Raises:
            DataError: in place of TensorFlow's error for a batch that cannot be split.
            DtrainError: in place of TensorFlow's error for one that a Python function in the graph raised.
        """
        token = _running.set(self)
        step = (lambda: steps_counted(self.model)) if self.kind == "fit" else None
        try:
            with events.loop(self.kind, step):
                yield
        except (tf.errors.InvalidArgumentError, tf.errors.UnknownError) as error:
            own = data_error_of(error) or array_functions.error_of_array_function(error)
            if own is None:
                raise
            raise own from None
        finally:
            _running.reset(token)


_running: ContextVar[Loop | None] = ContextVar("running", default=None)


def current_loop() -> Loop:
    """The innermost loop that runs in this thread; a `Loop` without a kind if none does."""
    return _running.get() or Loop()


def loop_of(model: Any) -> Loop:
    """As `current_loop`, if that is a loop of this model; else a `Loop` without a kind."""
    loop = current_loop()
    return loop if loop.model is model else Loop()


def steps_counted(model: Any) -> int:
    """The steps that a model's optimizer has counted; 0 if a user's own optimizer counts none."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    with contextlib.suppress(AttributeError):
        return int(keras_optimizers.iterations_of(optimizer).numpy())
    return 0
