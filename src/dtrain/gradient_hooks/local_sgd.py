"""Weights that are averaged every few steps, instead of gradients that are reduced."""

from __future__ import annotations

from dtrain.interfaces.gradient_hook import GradientHook, check_integer, check_steps


class LocalSGD(GradientHook):
    """Lets each replica update its own weights, and averages them every few steps (Stich, 2019).

    Args:
        average_every: the number of steps (batches) from one averaging to the next.
        quorum: the fewest workers of a round, in a job of `dtrain launch --quorum`: it must be the same
            number. None leaves it to the launcher. A round goes on without those that are lost or slow.

    Raises:
        ConfigurationError: an argument is not an integer of at least 1.
    """

    def __init__(self, average_every: int = 8, *, quorum: int | None = None) -> None:
        check_steps(average_every, "average_every", least=1)
        if quorum is not None:
            check_integer(quorum, "quorum", least=1, hint="it is a number of workers")
        self.average_every = average_every
        self.quorum = quorum or 0
