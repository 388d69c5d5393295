"""Between two steps of `fit` all is at rest: what one step wrote is written, and the next has read nothing.

Here whoever must act at such a moment is called, with the epoch's iterator. What is done is theirs to say.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from dtrain import events
from dtrain.errors import ConfigurationError
from dtrain.keras_engine.cutting import typed_errors
from dtrain.keras_engine.protocol import layout_of
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream.reach import replaces


class FitSession(Protocol):
    """What a callback with `dtrain_session(model, arguments)` gives to take part in one `fit`.

    All its methods are called on every worker.
    """

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """What `fit` is to call in the place of the user's callbacks."""

    def attach(self, iterator: Any) -> None:
        """Given the iterator that `fit` trains on, before the callbacks are called."""

    def between_steps(self, iterator: Any, done: int) -> None:
        """Called before an epoch's first step, between two, and after its last."""

    def room(self) -> int | None:
        """How many steps may be made before `between_steps` must be called; None for any number."""

    def end(self, history: Any) -> None:
        """Called when `fit` has ended well, with what it returns."""

    def left(self) -> None:
        """Called when `fit` was left by an exception; must not raise, nor wait for other workers."""


class NoSession:
    """Nobody takes part."""

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The user's."""
        return callbacks

    def attach(self, iterator: Any) -> None:
        """Nothing."""

    def between_steps(self, iterator: Any, done: int) -> None:
        """Nothing."""

    def room(self) -> int | None:
        """Any number."""
        return None

    def end(self, history: Any) -> None:
        """Nothing."""

    def left(self) -> None:
        """Nothing."""


_waiting: list[FitSession] = []


@contextlib.contextmanager
def at_steps_of_training(session: FitSession) -> Iterator[None]:
    """The first iterator that is made within it, which is the one that `fit` trains on, is the session's."""
    _waiting.append(session)
    try:
        yield
    finally:
        if session in _waiting:
            _waiting.remove(session)


def announce(iterator: Any) -> None:
    """Called by every new iterator of epochs: it is told whom to call."""
    iterator.between_steps = _note
    if _waiting:
        session = _waiting.pop()
        session.attach(iterator)

        def hook(iterator: Any, done: int) -> None:
            _note(iterator, done)
            session.between_steps(iterator, done)

        iterator.between_steps = hook
        iterator.room = session.room


def _note(iterator: Any, done: int) -> None:
    events.emit(events.BetweenSteps(done))


_steps_done: weakref.WeakSet[Any] = weakref.WeakSet()


def epoch_goes_on(model: Any) -> None:
    """Says that the running epoch began in another process; its metrics are in place."""
    _steps_done.add(model)


@replaces(upstream_keras.EPOCH_LOGS)
def epoch_logs(original: Callable[..., Any], self: Any, logs: Any) -> Any:
    """The replacement of what makes an epoch's logs of its last step's: it may have had no step here."""
    goes_on = self in _steps_done
    _steps_done.discard(self)
    layout = layout_of(self.distribute_strategy)
    together = layout is not None and layout.workers > 1
    # Metrics of several workers are there when all have given theirs.
    with events.waiting_for_others() if together else contextlib.nullcontext():
        if goes_on and not logs:
            return dict(self.get_metrics_result())
        whole = getattr(self.train_function or self.test_function, "metrics", None)
        found = None if whole is None else whole()
        if found is None:
            return original(self, logs)
    # As Keras': where the step gives other names, it knows better.
    return found if isinstance(logs, dict) and set(logs) == set(found) else logs


def wants_session(callbacks: Any) -> bool:
    """Whether one of the callbacks that `fit` was given takes part as a session."""
    return any(hasattr(each, "dtrain_session") for each in listed(callbacks))


def begin_session(model: Any, arguments: dict[str, Any]) -> FitSession:
    """The session of the first callback that wants one; its callbacks are put into the arguments of `fit`."""
    given = arguments["callbacks"]
    each_given = listed(given)
    wanting = [each for each in each_given if hasattr(each, "dtrain_session")]
    if len(wanting) > 1:
        raise ConfigurationError(
            f"fit was given {len(wanting)} callbacks that save and restore its state.",
            hint="Give it one BackupAndRestore; it may save by steps, epochs and seconds at once.",
        )
    if not wanting:
        return NoSession()
    session: FitSession = wanting[0].dtrain_session(model, arguments)
    wrapped = session.callbacks(each_given)
    if isinstance(given, keras.callbacks.CallbackList):
        # The list is the user's, who may give it to another fit.
        copied = copy.copy(given)
        copied.callbacks = wrapped
        copied.set_model(model)
        arguments["callbacks"] = copied
    else:
        arguments["callbacks"] = wrapped
    return session


@contextlib.contextmanager
def reported(kind: str, step: Callable[[], int] | None = None) -> Iterator[None]:
    """Whoever listens knows that this process is in `fit`, `evaluate` or `predict`.

    Args:
        kind: which of them.
        step: as in `events.LoopBegins`.

    Raises:
        DataError: in the place of TensorFlow's error for a batch that cannot be cut.
    """
    with events.loop(kind, step), typed_errors():
        yield


def listed(callbacks: Any) -> list[Any]:
    """The callbacks that `fit` was given, in whatever form."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [] if callbacks is None else list(keras.tree.flatten(callbacks))
