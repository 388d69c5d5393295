"""What takes part in a `fit` between its steps, such as saving checkpoints.

Between two steps nothing changes: what one step wrote is written, and the next has read nothing. The iterator
of epochs calls the `FitSession` there; what that does is its own affair.
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
    """Takes part in one `fit`; made by the method `dtrain_session(model, arguments)` of a callback.

    All its methods are called on every worker.
    """

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The callbacks that `fit` calls instead of the user's."""

    def attach(self, iterator: Any) -> None:
        """Gets the iterator that `fit` trains on, before the callbacks are called."""

    def between_steps(self, iterator: Any, done: int) -> None:
        """Called before each call of the train function, and after the last one of an epoch.

        The call that finds the end of data of unknown length comes between two calls with the same number.

        Args:
            iterator: as for `attach`.
            done: batches of the epoch that are done.
        """

    def max_steps(self) -> int | None:
        """How many steps may be made before the next `between_steps`; None for any number."""

    def end(self, history: Any) -> None:
        """Called when `fit` has ended well, with what it returns."""

    def left(self) -> None:
        """Called when an exception ended `fit`. It must neither raise nor wait for other workers."""


class NoSession:
    """Takes no part."""

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The user's callbacks."""
        return callbacks

    def attach(self, iterator: Any) -> None:
        """Nothing."""

    def between_steps(self, iterator: Any, done: int) -> None:
        """Nothing."""

    def max_steps(self) -> int | None:
        """Any number."""
        return None

    def end(self, history: Any) -> None:
        """Nothing."""

    def left(self) -> None:
        """Nothing."""


_steps_done: weakref.WeakSet[Any] = weakref.WeakSet()


def epoch_goes_on(model: Any) -> None:
    """Notes that the running epoch began in another process, whose metrics were restored."""
    _steps_done.add(model)


@replaces(upstream_keras.EPOCH_LOGS)
def epoch_logs(original: Callable[..., Any], self: Any, logs: Any) -> Any:
    """The replacement of the method that makes an epoch's logs of those of its last step.

    A restored epoch may have had no step in this process.
    """
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
    """Whether one of the callbacks of `fit` has a session."""
    return any(hasattr(each, "dtrain_session") for each in listed(callbacks))


def begin_session(model: Any, arguments: dict[str, Any]) -> FitSession:
    """The session of the callback that has one; its callbacks replace those in the arguments of `fit`."""
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
        # The user may give the same list to another fit.
        copied = copy.copy(given)
        copied.callbacks = wrapped
        copied.set_model(model)
        arguments["callbacks"] = copied
    else:
        arguments["callbacks"] = wrapped
    return session


@contextlib.contextmanager
def reported(kind: str, step: Callable[[], int] | None = None) -> Iterator[None]:
    """Reports to listeners that this process is in `fit`, `evaluate` or `predict`.

    Args:
        kind: which of them.
        step: as in `events.LoopBegins`.

    Raises:
        DataError: instead of TensorFlow's error for a batch that cannot be split.
    """
    with events.loop(kind, step), typed_errors():
        yield


def listed(callbacks: Any) -> list[Any]:
    """The callbacks of `fit`, in whatever form they were given."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [] if callbacks is None else list(keras.tree.flatten(callbacks))
