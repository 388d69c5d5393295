"""Weights that are averaged every few steps, instead of gradients that are reduced."""

from __future__ import annotations

from dtrain.interfaces.gradient_hook import GradientHook, check_steps


class LocalSGD(GradientHook):
    """Lets each replica update its own weights, and averages them every few steps (Stich, 2019).

    Args:
        average_every: the number of steps (batches) from one averaging to the next.

    Raises:
        ConfigurationError: it is not an integer of at least 1.
    """

    def __init__(self, average_every: int = 8) -> None:
        check_steps(average_every, "average_every", least=1)
        self.average_every = average_every
