"""A running `fit`, `evaluate` or `predict`: what it needs, which one runs, and how many steps a call makes.

`fitting.py` makes a `Loop` before it calls Keras' own method. Where Keras calls dtrain back without
arguments, `current_loop` returns the loop. The loop over the calls of the train or test function is Keras'
own, not written here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.splitting import data_error_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.running_operations import current_operation
from dtrain.process_group.value_exchange import exchange
from dtrain.telemetry import events
from dtrain.upstream import array_functions, keras_optimizers, tf_tracing

TARGET_SECONDS = 0.1
"""The intended duration of a call; callbacks should wait for at most twice as long."""

_GROWTH = 8  # the most by which the number of steps is multiplied from one call to the next
_MOST = 4096  # the most steps of a call
_MEETING = 8  # at every eighth call, the workers exchange and agree on the number
_FIRST_MEETINGS = 8  # up to this call, they do so at every call but the first, while the number grows
# How Keras names what belongs to a loop, as `train_function`, and what stops it, as `stop_training`.
_WORDS = {
    "fit": ("train", "training"),
    "evaluate": ("test", "evaluating"),
    "predict": ("predict", "predicting"),
}


class FitSession:
    """Takes part in one `fit`, such as by saving checkpoints between steps; this one does nothing.

    A callback's method `dtrain_session(model, arguments)` returns another session. Between two steps the
    state is consistent: all writes of the last step are complete, and the next step has read nothing. Every
    worker calls all its methods; `left` is called only where an exception ended `fit`.
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
        functions: traced functions, by their names. The train function sets its own, which later calls of
            `fit` use again.
    """

    savable: bool = True
    apart: bool = False

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def traced(self, strategy: Any, function: Callable[[], None]) -> Callable[[], Any]:
        """A method of this class, run in each replica of a strategy; it is traced once a train function."""
        name = function.__qualname__
        if name not in self.functions:
            run = tf_tracing.made_for_each_model(lambda: strategy.run(function))
            with events.part("start", doing="compute"):
                self.functions[name] = run.get_concrete_function()
        return self.functions[name]

    def open(self) -> None:
        """Called when an epoch begins."""

    def fitting(self, steps: int) -> int:
        """How many steps a call should have, of at most `steps`, so that the state can be saved after it."""
        return steps

    def next_run(self, most: int) -> tuple[str | None, int]:
        """Chooses how the next steps treat gradients, and how many steps, at most `most`, do so.

        Returns:
            A phase (see `accumulation.py`), or None for the usual way; and the number of steps.
        """
        return None, most

    def note(self, steps: int) -> None:
        """Notes that steps have run."""

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


class Call:
    """One call of a train, test or predict function, which gets this object as its iterator over batches.

    Args:
        iterator: the iterator to read batches from.
        steps: the number of planned steps.

    Attributes:
        iterator, steps: as given.
        ran: the steps that ran, fewer than planned if the data ended; None before the call.
        seconds: the time of those steps; None if it is not typical, because something was traced.
    """

    def __init__(self, iterator: Any, steps: int) -> None:
        self.iterator = iterator
        self.steps = steps
        self.ran: int | None = None
        self.seconds: float | None = None

    @property
    def unmade(self) -> int:
        """The planned steps that did not run because the data ended."""
        return 0 if self.ran is None else self.steps - self.ran

    def last_step(self, planned: int) -> int:
        """The number of this call's last step, for the callbacks after it; `planned` is the planned one."""
        return planned if self.steps == 1 else LastStep(planned, lambda: planned - self.unmade)

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class GroupCall(Call):
    """One call of a predict function for several batches, which the function reads by itself."""

    def __next__(self) -> GroupCall:
        return self


class LastStep(int):
    """The number of a call's step that Keras passes to callbacks after the call.

    As an int it is the number that Keras expects. Adding to it uses the step that really was the last, also
    if the data ended earlier, so `batch + 1` is the number of steps that ran.
    """

    last: Callable[[], int]

    def __new__(cls, step: int, last: Callable[[], int]) -> LastStep:  # noqa: D102
        made = super().__new__(cls, step)
        made.last = last
        return made

    def __add__(self, other: int) -> int:
        return self.last() + other

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as the plain number, as a callback's state in a checkpoint."""
        return int, (int(self),)


class CallSize:
    """Chooses the number of steps for the calls of one epoch iterator.

    With more steps per call, Python costs less per step; with fewer, callbacks and the progress bar are
    called in time. The results do not depend on the number, because the same program runs.

    Args:
        layout: how the replicas are distributed.
        every_batch: whether each call is one step, because a callback needs each batch.
    """

    def __init__(self, layout: ReplicaLayout, *, every_batch: bool) -> None:
        self.every_batch = every_batch
        self._layout = layout
        self._size = 1
        self._proposed = 1
        self._calls = 0

    def steps(self) -> int:
        """The most steps of the next call. All workers must call it, equally often."""
        if self.every_batch:
            return 1
        self._calls += 1
        if self._layout.workers == 1:
            self._size = self._proposed
        elif self._calls > 1 and (self._calls <= _FIRST_MEETINGS or self._calls % _MEETING == 0):
            # The slowest worker decides, because a call ends when all workers have run its steps.
            self._size = min(exchange(self._layout, self._proposed, what="the steps of a call"))
        return self._size

    def note(self, call: Call) -> None:
        """Adjusts the number of steps to the time that a call took."""
        if self.every_batch or not call.ran or call.seconds is None:
            return
        fitting = int(TARGET_SECONDS * call.ran / max(call.seconds, 1e-6))
        self._proposed = max(1, min(fitting, _GROWTH * call.ran, _MOST))
