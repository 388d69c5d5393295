"""What each replica of a `fit` holds by itself for some steps: what the loop over the steps asks of it.

It is implemented in `engine/synchronisation/`: `accumulation.py`, `weight_averages.py`, `outer_steps.py` and
`steps_without_hook.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrain.telemetry import events
from dtrain.upstream import tf_tracing


class LocalState:
    """What each replica of a `fit` holds by itself for some steps; here nothing: all replicas are equal.

    Every worker calls all its methods, in the same order; `abandon` is called where an exception ended `fit`.

    Attributes:
        savable: whether a checkpoint can be saved now.
        apart: whether the optimizer's accumulators hold partial sums, one a replica.
        round_begins: whether a round begins, where replicas train alone.
        functions: traced functions, by their names. The train function sets its own, which later calls of
            `fit` use again.
    """

    savable: bool = True
    apart: bool = False
    round_begins: bool = True

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

    def count(self, examples: int | None) -> None:
        """Notes the examples of the steps that have run, over all replicas; called before `note`."""

    def note(self, steps: int) -> None:
        """Notes that steps have run."""

    def close(self) -> None:
        """Makes all replicas equal, at the end of an epoch's steps."""

    def whole_logs(self, logs: Any) -> Any:
        """The logs of an epoch over all that train, given those of this strategy's replicas."""
        return logs

    def restore(self, *, apart: bool) -> None:
        """Notes that a checkpoint was restored; `apart` is as the attribute for what it held."""

    def abandon(self) -> None:
        """Cleans up after an error."""
