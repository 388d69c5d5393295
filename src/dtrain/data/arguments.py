"""Checks the functions that a pipeline is given: they must accept the arguments they will get.

It does not check the content of a source; the code that reads the source does.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError


def is_function(source: Any) -> bool:
    """Whether a source is a function; arrays and datasets do not count, even if they are callable."""
    return callable(source) and not hasattr(source, "__array__") and not isinstance(source, tf.data.Dataset)


def taking(function: Any, count: int, name: str, what: str) -> Any:
    """Wrap a user's function as a `tf.function`, after checking that it takes `count` arguments.

    AutoGraph then converts the function wherever it is called.

    Raises:
        ConfigurationError: the argument is no function, or the function does not take `count` arguments.
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
