"""Scales a learning rate that was found with one batch size to another batch size.

It only computes a number; `schedules.py` changes the rate during training.
"""

from __future__ import annotations

import math

from dtrain.base.words import SCALINGS, known_word
from dtrain.errors import ConfigurationError


def scaled_rate(rate: float, *, batch: int, base_batch: int, scaling: str = "linear") -> float:
    """The learning rate for a batch size, from a rate that works for another batch size.

    "linear" keeps the change per example the same over small steps (Goyal et al., arXiv:1706.02677, section
    2.1, for SGD with momentum). They combine it with a gradual warm-up from the rate before scaling:
    `WarmUp(..., start=rate)`. "sqrt" keeps the noise of a step the same (Krizhevsky, arXiv:1404.5997); it is
    usual for Adam and similar optimizers.

    Args:
        rate: the known rate.
        batch: examples in the global batch to train with.
        base_batch: examples in the global batch that `rate` was found with.
        scaling: "linear", "sqrt", or "none", which returns `rate`.

    Returns:
        The scaled rate.

    Raises:
        ConfigurationError: the scaling is not known, or a number is not positive.

    Example:
        ```python
        print(dtrain.optim.scaled_rate(0.1, batch=1024, base_batch=256))  # 0.4
        ```
    """
    kind = known_word("scaling", scaling, SCALINGS)
    for name, value in (("rate", rate), ("batch", batch), ("base_batch", base_batch)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigurationError(
                f"{name}={value!r} was set, but a rate cannot be scaled with it.",
                hint="rate, batch and base_batch are numbers above 0; batches count examples of all replicas",
            )
    factor = batch / base_batch
    if kind == "none":
        return float(rate)
    return float(rate * (factor if kind == "linear" else math.sqrt(factor)))
