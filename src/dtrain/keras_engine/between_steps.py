"""What takes part in a `fit` between its steps, such as saving checkpoints.

Between two steps the state is consistent: all writes of the last step are complete, and the next step has
read nothing. The epoch iterator calls the `FitSession` there; what a session does is not decided here.
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
from dtrain.keras_engine.protocol import layout_of
from dtrain.keras_engine.row_checks import typed_errors
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream.reach import replaces


class FitSession(Protocol):
    """Takes part in one `fit`. The method `dtrain_session(model, arguments)` of a callback makes it.

    Every worker calls all its methods; `left` is called only where an exception ended `fit`.
    """

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The callbacks that `fit` runs in place of the given ones."""

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

    def end(self, history: Any) -> None:
        """Called when `fit` has succeeded, with the `History` that it returns."""

    def left(self) -> None:
        """Called when an exception has ended `fit`. It must neither raise nor wait for other workers."""


class NoSession:
    """A session that does nothing."""

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The given callbacks."""
        return callbacks

    def attach(self, iterator: Any) -> None:
        """Does nothing."""

    def between_steps(self, iterator: Any, done: int) -> None:
        """Does nothing."""

    def max_steps(self) -> int | None:
        """No limit."""
        return None

    def end(self, history: Any) -> None:
        """Does nothing."""

    def left(self) -> None:
        """Does nothing."""


# The models whose current epoch began in another process.
_steps_done: weakref.WeakSet[Any] = weakref.WeakSet()


def epoch_goes_on(model: Any) -> None:
    """Notes that a model's current epoch began in another process, and that its metrics were restored."""
    _steps_done.add(model)


@replaces(upstream_keras.EPOCH_LOGS)
def epoch_logs(original: Callable[..., Any], self: Any, logs: Any) -> Any:
    """The replacement of the method that computes an epoch's logs from the logs of its last step.

    A resumed epoch may have no step in this process; its logs are then the results of the restored metrics.
    """
    goes_on = self in _steps_done
    _steps_done.discard(self)
    layout = layout_of(self.distribute_strategy)
    together = layout is not None and layout.workers > 1
    # Under several workers, computing the metrics waits until every worker has contributed its own.
    with events.waiting_for_others() if together else contextlib.nullcontext():
        if goes_on and not logs:
            return dict(self.get_metrics_result())
        whole = getattr(self.train_function or self.test_function, "metrics", None)
        found = None if whole is None else whole()
        if found is None:
            return original(self, logs)
    # As in Keras: if a custom step returned logs of other names than the metrics', its logs are kept.
    return found if isinstance(logs, dict) and set(logs) == set(found) else logs


def wants_session(callbacks: Any) -> bool:
    """Whether one of the callbacks of `fit` has the method `dtrain_session`."""
    return any(hasattr(each, "dtrain_session") for each in listed(callbacks))


def begin_session(model: Any, arguments: dict[str, Any]) -> FitSession:
    """Makes the session of a `fit`, and puts the session's callbacks into the arguments.

    Args:
        model: the model that `fit` trains.
        arguments: of `fit`, by name; "callbacks" is replaced.

    Returns:
        The session of the callback that has one; a `NoSession` if none has.

    Raises:
        ConfigurationError: several callbacks have one.
    """
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
        # A copy, because the user may give the same list to another fit.
        copied = copy.copy(given)
        copied.callbacks = wrapped
        copied.set_model(model)
        arguments["callbacks"] = copied
    else:
        arguments["callbacks"] = wrapped
    return session


@contextlib.contextmanager
def reported(kind: str, step: Callable[[], int] | None = None) -> Iterator[None]:
    """Emits the events that a `fit`, `evaluate` or `predict` begins and ends.

    Args:
        kind: "fit", "evaluate" or "predict".
        step: as in `events.LoopBegins`.

    Raises:
        DataError: in place of TensorFlow's error for a batch that cannot be split.
    """
    with events.loop(kind, step), typed_errors():
        yield


def listed(callbacks: Any) -> list[Any]:
    """The callbacks of `fit` as a flat list; given as a `CallbackList`, a nest, a single one or None."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [] if callbacks is None else list(keras.tree.flatten(callbacks))
