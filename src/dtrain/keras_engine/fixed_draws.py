"""Gives trials constants for random numbers: the same in each run and for each example.

A trial compares runs on different examples. Masks and noise drawn anew would look like differences, or make
a sum look like a mean.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_DRAWS = (
    "normal", "stateless_normal", "truncated_normal", "stateless_truncated_normal", "uniform",
    "stateless_uniform",
)  # fmt: skip
_lock = threading.RLock()


@contextlib.contextmanager
def fixed_draws() -> Iterator[None]:
    """A context for tracing: what this thread draws inside it is constant, and dropout changes nothing.

    It holds for the uniform and normal draws of `tf.random`, which `keras.random` calls, if their shape is
    known but for the examples; other draws stay random.
    """
    thread, numbers = threading.get_ident(), itertools.count()
    places: list[tuple[Any, str, Callable[..., Any]]] = [(tf.random, name, _constant) for name in _DRAWS]
    places += [(tf.nn, "dropout", _unchanged), (tf.nn.experimental, "stateless_dropout", _unchanged)]

    def replaced(original: Callable[..., Any], instead: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = None
        if threading.get_ident() == thread and not tf.executing_eagerly():  # as for initial values
            given = inspect.signature(original).bind(*args, **kwargs)
            given.apply_defaults()
            found = instead(np.random.default_rng(next(numbers)), **given.arguments)
        return original(*args, **kwargs) if found is None else found

    with _lock, contextlib.ExitStack() as stack:
        for module, name, instead in places:
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, functools.partial(replaced, original, instead))
        yield


def _unchanged(numbers: np.random.Generator, x: Any, **given: Any) -> Any:
    """What dropout gives on average."""
    return tf.convert_to_tensor(x)


def _constant(numbers: np.random.Generator, shape: Any, dtype: Any, **given: Any) -> Any:
    """Constants of a distribution, equal for all examples; None if they stay random.

    Args:
        numbers: draws them.
        shape: the shape; its first dimension is taken for that of the examples.
        dtype: the numbers' dtype.
        given: `mean` and `stddev`, or `minval` and `maxval`.
    """
    sizes = tf.zeros(shape, tf.bool).shape  # what is known of them
    if sizes.rank is None or None in sizes[1:]:
        return None
    one = (1, *sizes[1:])[: sizes.rank]
    if "mean" in given:
        low, width, drawn = given["mean"], given["stddev"], numbers.standard_normal(one).clip(-2, 2)
    elif given["minval"] is None:  # all integers
        return None
    else:
        low, drawn = given["minval"], numbers.random(one)
        high = 1 if given["maxval"] is None else given["maxval"]
        width = tf.cast(high, tf.float64) - tf.cast(low, tf.float64)
    drawn = tf.cast(low, tf.float64) + tf.cast(width, tf.float64) * drawn
    drawn = tf.floor(drawn) if tf.as_dtype(dtype).is_integer else drawn
    return tf.broadcast_to(tf.cast(drawn, dtype), shape)
