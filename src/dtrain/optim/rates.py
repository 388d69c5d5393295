"""How large the learning rate should be when the batch is not the one that it was found with.

It only computes a number; how the rate changes while training is `schedules.py`'s.
"""

from __future__ import annotations

import math

from dtrain.errors import ConfigurationError
from dtrain.words import SCALINGS, known_word


def scaled_rate(rate: float, *, batch: int, base_batch: int, scaling: str = "linear") -> float:
    """The learning rate for a batch, from one that is known to work for another batch.

    "linear" keeps the change per example the same over small steps, as Goyal et al. found for SGD with
    momentum (arXiv:1706.02677, section 2.1); they pair it with a gradual warm-up, which is
    `WarmUp(..., start=rate)` with the rate before scaling. "sqrt" keeps the noise of the step the same
    (Krizhevsky, arXiv:1404.5997) and is what Adam and its like are usually given.

    Args:
        rate: the known rate.
        batch: examples in the global batch to train with.
        base_batch: examples in the global batch that `rate` was found with.
        scaling: "linear", "sqrt", or "none", which gives `rate` back.

    Raises:
        ConfigurationError: the scaling is not known, or a number is not positive.
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
