"""Gives trials constants for random numbers: an example gets the same ones in each run.

A trial compares runs on different examples. Masks and noise drawn anew would look like differences, or make
a sum look like a mean.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.keras_engine.rows import batch_rows, present_leaves

_DRAWS = (
    "normal", "stateless_normal", "truncated_normal", "stateless_truncated_normal", "uniform",
    "stateless_uniform",
)  # fmt: skip
_KINDS = 8  # examples with numbers of their own
_MOST = 1 << 20  # numbers for an example from which on all get the same
_lock = threading.RLock()


def example_numbers(batch: Any) -> Any:
    """A number for each example of a batch, from what it contains; shape (examples,), int32."""
    numbers = [0] * int(batch_rows(batch))
    for leaf in present_leaves(batch):
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            rows = [np.asarray(row) for row in leaf.numpy()]
            content = (repr(row).encode() if row.dtype == object else row.tobytes() for row in rows)
            numbers = [zlib.crc32(each, number) for each, number in zip(content, numbers, strict=True)]
    return tf.constant([number % _KINDS for number in numbers], tf.int32)


@contextlib.contextmanager
def fixed_draws(examples: Any) -> Iterator[None]:
    """A context for tracing: what this thread draws inside it is constant, and dropout changes nothing.

    It holds for the uniform and normal draws of `tf.random`, which `keras.random` calls, if their shape is
    known but for the examples; other draws stay random.

    Args:
        examples: a number for each example, which decides what is drawn for it; shape (examples,), int32.
    """
    thread, numbers = threading.get_ident(), itertools.count()
    places: list[tuple[Any, str, Callable[..., Any]]] = [(tf.random, name, _constant) for name in _DRAWS]
    places += [(tf.nn, "dropout", _unchanged), (tf.nn.experimental, "stateless_dropout", _unchanged)]

    def replaced(original: Callable[..., Any], instead: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = None
        if threading.get_ident() == thread and not tf.executing_eagerly():  # as for initial values
            given = inspect.signature(original).bind(*args, **kwargs)
            given.apply_defaults()
            found = instead(np.random.default_rng(next(numbers)), examples, **given.arguments)
        return original(*args, **kwargs) if found is None else found

    with _lock, contextlib.ExitStack() as stack:
        for module, name, instead in places:
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, functools.partial(replaced, original, instead))
        yield


def _unchanged(numbers: np.random.Generator, examples: Any, x: Any, **given: Any) -> Any:
    """What dropout gives on average."""
    return tf.convert_to_tensor(x)


def _constant(numbers: np.random.Generator, examples: Any, shape: Any, dtype: Any, **given: Any) -> Any:
    """Constants of a distribution; None if they stay random.

    Args:
        numbers: draws them.
        examples: as of `fixed_draws`.
        shape: the shape; its first dimension, if not known, is taken for that of the examples.
        dtype: the numbers' dtype.
        given: `mean` and `stddev`, or `minval` and `maxval`.
    """
    sizes = tf.zeros(shape, tf.bool).shape  # what is known of them
    if sizes.rank is None or None in sizes[1:]:
        return None
    kinds = _KINDS if math.prod(sizes[1:]) < _MOST else 1
    size = (kinds, *sizes[1:])[: sizes.rank]
    if "mean" in given:
        low, width, drawn = given["mean"], given["stddev"], numbers.standard_normal(size).clip(-2, 2)
    elif given["minval"] is None:  # all integers
        return None
    else:
        low, drawn = given["minval"], numbers.random(size)
        high = 1 if given["maxval"] is None else given["maxval"]
        width = tf.cast(high, tf.float64) - tf.cast(low, tf.float64)
    drawn = tf.cast(low, tf.float64) + tf.cast(width, tf.float64) * drawn
    drawn = tf.floor(drawn) if tf.as_dtype(dtype).is_integer else drawn
    drawn = tf.cast(drawn, dtype)
    return tf.gather(drawn, _rows(examples, sizes[0], shape) % kinds) if sizes.rank else drawn


def _rows(examples: Any, known: int | None, shape: Any) -> Any:
    """For each index of the first dimension, the number of its example, and of the position within it."""
    count = tf.convert_to_tensor(shape, tf.int32)[0]
    places = tf.range(count)
    if known is not None and known != examples.shape[0]:
        return places
    each = tf.maximum(count // tf.maximum(tf.size(examples), 1), 1)
    return tf.gather(examples, tf.minimum(places // each, tf.size(examples) - 1)) + places % each
