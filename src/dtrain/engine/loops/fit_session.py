"""What takes part in one `fit` between its steps, such as the session that saves checkpoints."""

from __future__ import annotations

from typing import Any


class FitSession:
    """Takes part in one `fit`, such as by saving checkpoints between steps; this one does nothing.

    A callback's method `dtrain_session(model, arguments)` returns another session. Between two steps the
    state is consistent: all writes of the last step are complete, and the next step has read nothing. Every
    worker calls all its methods; `left` is called only where an exception ended `fit`.
    """

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The callbacks that `fit` runs in place of the given ones."""
        return callbacks

    def joins(self, epoch: int, done: int, total: int) -> None:
        """Called where this worker takes the state of others that train; nothing else is to be restored.

        Args:
            epoch: the epoch in which it goes on, counted from 0.
            done: completed steps of that epoch.
            total: completed steps of all epochs.
        """

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
