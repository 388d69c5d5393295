"""Checks the counts that `fit`, `evaluate` and `predict` are given, such as `batch_size`, before they run.

Keras treats some invalid counts as not given: `batch_size=0` trains with 32. No other argument is checked.
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
    """Checks that each count among the arguments of a call is whole and not too small; None is allowed.

    Raises:
        ConfigurationError: a count is not; it names the argument, its value and the least allowed value.
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
        return value.is_integer() and value >= least  # such as `len(x) / 32` without a remainder
    try:
        return operator.index(value) >= least
    except TypeError:
        return False
