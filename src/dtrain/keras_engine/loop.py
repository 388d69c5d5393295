"""A running `fit`, `evaluate` or `predict`: what it needs, and which one runs now.

`fitting.py` makes a `Loop` before it calls Keras' own method. Where Keras calls dtrain back without
arguments, `current_loop` returns the loop. No loop over batches is written here: that is Keras' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dtrain import events
from dtrain.keras_engine import row_checks
from dtrain.upstream import keras as upstream_keras


class FitSession:
    """Takes part in one `fit`, such as by saving checkpoints between steps; this one does nothing.

    The method `dtrain_session(model, arguments)` of a callback makes another. Between two steps the state is
    consistent: all writes of the last step are complete, and the next step has read nothing. Every worker
    calls all its methods; `left` is called only where an exception ended `fit`.
    """

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The callbacks that `fit` runs in place of the given ones."""
        return callbacks

    def attach(self, iterator: Any) -> None:
        """Called with the epoch iterator that `fit` trains on, before any callback is called."""

    def between_steps(self, iterator: Any, done: int) -> None:
        """Called before each call of the train function, and after the last one of an epoch.

        Where only reading shows that the data has ended, the last call of the train function runs no step.
        `done` is then the same before and after it.

        Args:
            iterator: the epoch iterator, as for `attach`.
            done: completed steps of the epoch.
        """

    def max_steps(self) -> int | None:
        """The most steps that may run before the next `between_steps`; None for no limit."""
        return None

    def end(self, history: Any) -> None:
        """Called when `fit` has succeeded, with the `History` that it returns."""

    def left(self) -> None:
        """Called when an exception has ended `fit`. It must neither raise nor wait for other workers."""


class LocalState:
    """What each replica of a `fit` holds by itself for some steps; here nothing: all replicas are equal.

    Every worker calls all its methods, in the same order; `abandon` is called where an exception ended `fit`.

    Attributes:
        savable: whether a checkpoint can be saved now.
        apart: whether the optimizer's accumulators hold partial sums, one a replica.
    """

    savable: bool = True
    apart: bool = False

    def open(self) -> None:
        """Called when an epoch begins."""

    def fitting(self, steps: int) -> int:
        """How many steps a call should have, of at most `steps`, so that the state can be saved after it."""
        return steps

    def next_run(self, most: int, *, grouped: bool) -> tuple[str | None, int]:
        """Chooses how the next steps treat gradients, and how often that runs.

        Args:
            most: the largest number of steps that may run.
            grouped: whether all micro-batches of an update may run in one call.

        Returns:
            A phase (see `accumulation.py`), or None for the usual way; and a number of rounds.
        """
        return None, most

    def note(self, phase: str | None, steps: int) -> None:
        """Notes the phase that has just run, and how many steps it made."""

    def close(self) -> None:
        """Makes all replicas equal, at the end of an epoch's steps."""

    def restore(self, *, apart: bool) -> None:
        """Notes that a checkpoint was restored; `apart` is as the attribute for what it held."""

    def abandon(self) -> None:
        """Cleans up after an error."""


@dataclass(kw_only=True, eq=False)
class Loop:
    """One call of `fit`, `evaluate` or `predict`.

    Attributes:
        kind: "fit", "evaluate" or "predict"; "" for what stands for a loop where none runs.
        model: the model that is trained, evaluated or asked.
        every_batch: whether each call of the train or test function runs one step, because a callback needs
            each batch.
        session: is called between the steps.
        epochs: the number of epochs that a `fit` trains.
        validation: the loop over the validation data of a `fit`; None for other loops.
        training_is_read: whether Keras has made the epoch iterator of a `fit` over its training data.
        local: what each replica of a `fit` holds by itself.
        epoch_resumed: whether the running epoch of a `fit` began in another process, and its metrics were
            restored.
    """

    kind: str = ""
    model: Any = None
    every_batch: bool = True
    session: FitSession = field(default_factory=FitSession)
    epochs: int = 0
    validation: Loop | None = None
    training_is_read: bool = False
    local: LocalState = field(default_factory=LocalState)
    epoch_resumed: bool = False

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
        """
        token = _running.set(self)
        step = (lambda: steps_counted(self.model)) if self.kind == "fit" else None
        try:
            with events.loop(self.kind, step):
                yield
        except tf.errors.InvalidArgumentError as error:
            refused = row_checks.data_error_of(error)
            if refused is None:
                raise
            raise refused from None
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
        return int(upstream_keras.iterations_of(optimizer).numpy())
    return 0
