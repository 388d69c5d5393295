"""Refuses numbers that `fit`, `evaluate` and `predict` cannot count with, before anything runs.

Keras takes some of them for numbers that were not given: `batch_size=0` trains with 32.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from dtrain.errors import ConfigurationError

_LEAST = {
    "batch_size": 1,
    "validation_batch_size": 1,
    "steps_per_epoch": 1,
    "validation_steps": 1,
    "steps": 1,
    "epochs": 0,
    "initial_epoch": 0,
}


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Sees that numbers among the arguments of a call are whole and large enough; None is always so.

    Raises:
        ConfigurationError: naming the argument, what it was set to and the least that it may be.
    """
    for name, least in _LEAST.items():
        value = arguments.get(name)
        if value is not None and not _is_count(value, least):
            hint = f"set {name} to a whole number of at least {least}"
            raise ConfigurationError(
                f"{name}={value!r} was set, which is no number to count with.",
                hint=hint if name in ("epochs", "initial_epoch") else f"{hint}, or leave it out",
            )


def _is_count(value: Any, least: int) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return value.is_integer() and value >= least  # len(x) / 32 where it comes out even
    try:
        return operator.index(value) >= least
    except TypeError:
        return False
