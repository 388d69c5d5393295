"""Checks what a pipeline is given: whole numbers, and functions that can be called as they will be.

What a source holds is checked where it is read.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError


def is_function(source: Any) -> bool:
    """Whether a source is a function, and not an array or dataset that can be called."""
    return callable(source) and not hasattr(source, "__array__") and not isinstance(source, tf.data.Dataset)


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """An integer of any type, NumPy's too; no boolean.

    Raises:
        ConfigurationError: it is something else, or less than `least`.
    """
    try:
        found = value.__index__() if not isinstance(value, bool) else None
    except AttributeError:
        found = None
    if found is None or (least is not None and found < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise ConfigurationError(f"{name}={value!r} is not {wanted}.", hint=f"give {name} as {wanted}")
    return int(found)


def taking(function: Any, count: int, name: str, what: str) -> Any:
    """A function of the user's as a `tf.function`, if it can be called with so many arguments.

    So AutoGraph converts it, wherever it is called.

    Raises:
        ConfigurationError: it cannot.
    """
    if function is None:
        return None
    if not callable(function):
        raise ConfigurationError(f"{name} is a {type(function).__name__}.", hint=f"a function of {what}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return tf.function(function)
    try:
        signature.bind(*range(count))
    except TypeError as error:
        hint = "an example of several arrays is one tuple: lambda example: (example[0], example[1])"
        raise ConfigurationError(f"{name} must take {what}: {error}.", hint=hint) from error
    return tf.function(function)
